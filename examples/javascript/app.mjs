// Streams one answer from a running `updraft serve`: npm install openai && node app.mjs
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:4114/v1",
  apiKey: "any",
});
const stream = await client.chat.completions.create({
  model: "auto",
  messages: [{ role: "user", content: "What is 17 + 25?" }],
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
process.stdout.write("\n");
