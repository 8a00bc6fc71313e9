// What npm's `openai` gets of a server, as one JSON object: node openai_client.mjs PACKAGE URL
import { pathToFileURL } from "node:url";

const [folder, baseURL] = process.argv.slice(2);
const { default: OpenAI, BadRequestError } = await import(pathToFileURL(`${folder}/index.mjs`));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model: "smollm2", temperature: 0, max_tokens: 24 };
const messages = [{ role: "user", content: "What is the capital of France?" }];
const schema = {
  type: "object",
  properties: { name: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["name"],
  additionalProperties: false,
};

const whole = await client.chat.completions.create({ messages, ...asked });

let streamed = "";
for await (const chunk of await client.chat.completions.create({ messages, stream: true, ...asked })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}

const helper = client.chat.completions.stream({ messages, ...asked });
const collected = (await helper.finalChatCompletion()).choices[0].message.content;

const format = { type: "json_schema", json_schema: { name: "city", strict: true, schema } };
const parsed = await client.chat.completions.parse({ messages, response_format: format, ...asked });

let refusal = null;
try {
  await client.chat.completions.create({ messages, ...asked, temperature: 9 });
} catch (error) {
  refusal = { isBadRequest: error instanceof BadRequestError, param: error.param, status: error.status };
}

const long = await client.completions.create({ ...asked, prompt: "Once", max_tokens: 900, stream: true, ignore_eos: true });
for await (const _ of long) break; // which aborts it

const texts = { whole: whole.choices[0].message.content, streamed, collected };
console.log(JSON.stringify({ ...texts, parsed: parsed.choices[0].message.parsed, refusal }));
