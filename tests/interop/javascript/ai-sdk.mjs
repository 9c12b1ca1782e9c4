// The Vercel AI SDK: an answer, a stream, and a round of tools, from BASE_URL.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "updraft",
  baseURL: process.env.BASE_URL,
  apiKey: process.env.API_KEY,
});
const model = provider(process.env.MODEL);

const reply = await generateText({ model, prompt: "Hello" });
let streamed = "";
for await (const text of streamText({ model, prompt: "Hello" }).textStream) streamed += text;
const called = [];
const final = await generateText({
  model,
  prompt: "In 'Oslo'?",
  stopWhen: stepCountIs(3),
  tools: {
    weather: tool({
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (called.push(city), "sunny"),
    }),
  },
});
console.log(JSON.stringify({ reply: reply.text, streamed, called, final: final.text }));
