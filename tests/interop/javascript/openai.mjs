// The openai package for Node: an answer, a stream, and a round of tools, from BASE_URL.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "Hello" }];

const reply = await client.chat.completions.create({ model, messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const called = [];
const runner = client.chat.completions.runTools({
  model,
  messages: [{ role: "user", content: "In 'Oslo'?" }],
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        parse: JSON.parse,
        function: ({ city }) => (called.push(city), "sunny"),
        parameters: { type: "object", properties: { city: { type: "string" } } },
      },
    },
  ],
});
const final = await runner.finalContent();
console.log(JSON.stringify({ reply: reply.choices[0].message.content, streamed, called, final }));
