// What Vercel's AI SDK gets of a server, as one JSON object: node ai_sdk_client.mjs FOLDER URL
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, baseURL] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/package.json`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");

const provider = createOpenAICompatible({ name: "infer", baseURL, apiKey: "none", supportsStructuredOutputs: true });
const city = { type: "string", enum: ["Paris", "Rome"] };
const object = (properties) =>
  jsonSchema({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });

const cities = [];
const getWeather = tool({
  description: "The weather of a city.",
  inputSchema: object({ city }),
  execute: async (input) => {
    cities.push(input.city);
    return `${input.city}: rain`;
  },
});
const asked = {
  model: provider("smollm2"),
  prompt: "What is the weather in Paris?",
  temperature: 0,
  maxOutputTokens: 100,
  maxRetries: 0,
};
const steps = {
  ...asked,
  tools: { getWeather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
};

async function found(result) {
  const all = await result.steps;
  const results = all[0].toolResults.map((each) => each.output);
  return { cities: cities.splice(0), results, text: await result.text, reasons: all.map((step) => step.finishReason) };
}

const generated = await found(await generateText(steps));
const stream = streamText(steps);
for await (const _ of stream.fullStream);
const streamed = await found(stream);
const parsed = await generateObject({ ...asked, schema: object({ name: city }) });

console.log(JSON.stringify({ generated, streamed, object: parsed.object }));
