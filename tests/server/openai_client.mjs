// What a program in JavaScript does with the server, as JSON on stdout.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello there." }];
const base = { model: "tiny", messages, max_tokens: 80 };
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "find", description: "Finds.", parameters: schema } };

const whole = await client.chat.completions.create(base);
let streamed = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...base, ...options })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const tools = await client.chat.completions.create({ ...base, tools: [tool], tool_choice: "required" });
const format = { type: "json_schema", json_schema: { name: "city", schema, strict: true } };
const structured = await client.chat.completions.create({ ...base, response_format: format });
let error = null;
try {
  await client.chat.completions.create({ ...base, presence_penalty: 9 });
} catch (refused) {
  error = [refused.status, refused.param];
}
const left = await client.chat.completions.create({ ...base, max_tokens: 1500, stream: true });
for await (const _ of left) {
  left.controller.abort();
  break;
}
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    whole_usage: whole.usage,
    streamed,
    usage,
    tool: tools.choices[0].message.tool_calls[0].function.name,
    city: JSON.parse(structured.choices[0].message.content).city,
    error,
  }),
);
