// Asks a daemon by the clients that Node programs use, and writes what each of them got as a JSON object a line.
// Arguments: the folder whose node_modules has the clients, the daemon's address, a key, a model's name, and which
// clients are to ask (all without it).
//
// What an answer should be is said in test_node_clients.py. A text that the null model gets comes back as its answer.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, address, key, model, ...wanted] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));

// The module that `import NAME` would give there. require.resolve alone would take what is made for CommonJS.
const load = (name) => import(pathToFileURL(require.resolve(name)));

const TEXT = "grüße, 😀 and a line\nbreak";
const CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "Graz"}}\n</tool_call>';
const SCHEMA = {
  type: "object",
  properties: { word: { type: "string", maxLength: 8 } },
  required: ["word"],
  additionalProperties: false,
};
const DESCRIPTION = "Finds a word.";
const USER = [{ role: "user", content: TEXT }];

async function gathered(parts, text) {
  const texts = [];
  for await (const part of parts) texts.push(text(part) ?? "");
  return texts.join("");
}

async function failure(work) {
  try {
    return { gave: await work() };
  } catch (error) {
    const { name, status, statusCode, status_code, type, code, message, requestID, responseBody } = error;
    return { name, status: status ?? statusCode ?? status_code, type, code, message, requestID, responseBody };
  }
}

const clients = {
  async openai() {
    const { default: OpenAI } = await load("openai");
    const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: key, maxRetries: 0 });
    const asked = { model, messages: USER, max_tokens: 200, temperature: 0 };
    const chat = await client.chat.completions.create(asked);
    const usage_of = [];
    const streamed = await gathered(
      await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }),
      (part) => {
        if (part.usage) usage_of.push(part.usage);
        return part.choices[0]?.delta.content;
      },
    );
    const tool = { type: "function", function: { name: "look_up", description: DESCRIPTION, parameters: SCHEMA } };
    const seen = [];
    const runner = client.chat.completions.runTools({
      ...asked,
      messages: [{ role: "user", content: `So: ${CALL}` }],
      tools: [{ ...tool, function: { ...tool.function, parse: JSON.parse, function: (found) => (seen.push(found), "a town") } }],
    });
    const after = await runner.finalContent();
    const format = { type: "json_schema", json_schema: { name: "word", strict: true, schema: SCHEMA } };
    const formed = await client.chat.completions.parse({ ...asked, response_format: format });
    const response = await client.responses.create({ model, input: TEXT, temperature: 0, max_output_tokens: 200 });
    const events = client.responses.stream({ model, input: TEXT, temperature: 0, max_output_tokens: 200 });
    const final = await events.finalResponse();
    const models = [];
    for await (const each of client.models.list()) models.push(each.id);
    return {
      chat: chat.choices[0].message.content,
      usage: chat.usage,
      streamed,
      streamed_usage: usage_of,
      tool_arguments: seen,
      after,
      formed: formed.choices[0].message.parsed,
      response: response.output_text,
      response_streamed: final.output_text,
      completion: (await client.completions.create({ model, prompt: TEXT, max_tokens: 200, temperature: 0 })).choices[0].text,
      models,
      no_model: await failure(() => client.chat.completions.create({ ...asked, model: "nope" })),
      bad_field: await failure(() => client.chat.completions.create({ ...asked, temperature: -1 })),
      no_key: await failure(() => new OpenAI({ baseURL: `${address}/v1`, apiKey: "wrong", maxRetries: 0 }).models.list()),
    };
  },

  async anthropic() {
    const { default: Anthropic } = await load("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: address, apiKey: key, maxRetries: 0 });
    const asked = { model, max_tokens: 300, messages: USER };
    const message = await client.messages.create(asked);
    const starts = [];
    const stream = client.messages.stream(asked).on("streamEvent", (event) => {
      if (event.type === "message_start") starts.push({ ...event.message.usage });
    });
    const final = await stream.finalMessage();
    const tool = { name: "look_up", description: DESCRIPTION, input_schema: SCHEMA };
    const called = await client.messages
      .stream({ ...asked, messages: [{ role: "user", content: `So: ${CALL}` }], tools: [tool] })
      .finalMessage();
    const continued = await client.messages.create({
      ...asked,
      messages: [...USER, { role: "assistant", content: "grüße" }],
    });
    const models = [];
    for await (const each of client.models.list()) models.push(each.id);
    return {
      message: message.content,
      usage: message.usage,
      streamed: final.content,
      started_usage: starts,
      streamed_usage: final.usage,
      called: called.content.map(({ type, text, name, input }) => ({ type, text, name, input })),
      continued: continued.content,
      counted: await client.messages.countTokens({ model, messages: USER }),
      models,
      no_model: await failure(() => client.messages.create({ ...asked, model: "nope" })),
      bad_field: await failure(() => client.messages.create({ ...asked, temperature: -1 })),
      too_long: await failure(() => client.messages.create({ ...asked, messages: [{ role: "user", content: "x ".repeat(20000) }] })),
      no_key: await failure(() => new Anthropic({ baseURL: address, apiKey: "wrong", maxRetries: 0 }).messages.create(asked)),
    };
  },

  async ollama() {
    const { Ollama } = await load("ollama");
    const headers = { Authorization: `Bearer ${key}` };
    const client = new Ollama({ host: address, headers });
    const asked = { model, messages: USER, options: { temperature: 0, num_predict: 200 } };
    const chat = await client.chat(asked);
    const streamed = await gathered(await client.chat({ ...asked, stream: true }), (part) => part.message.content);
    const tool = { type: "function", function: { name: "look_up", description: DESCRIPTION, parameters: SCHEMA } };
    const called = await client.chat({ ...asked, messages: [{ role: "user", content: `So: ${CALL}` }], tools: [tool] });
    const formed = await client.chat({ ...asked, format: SCHEMA });
    return {
      chat: chat.message.content,
      done: chat.done_reason,
      counts: [chat.prompt_eval_count, chat.eval_count],
      streamed,
      generated: (await client.generate({ model, prompt: TEXT, options: asked.options })).response,
      called: called.message.tool_calls,
      formed: JSON.parse(formed.message.content),
      continued: (await client.chat({ ...asked, messages: [...USER, { role: "assistant", content: "grüße" }] })).message.content,
      models: (await client.list()).models.map((each) => each.name),
      shown: (await client.show({ model })).capabilities,
      running: (await client.ps()).models.map((each) => each.name),
      version: await client.version(),
      no_model: await failure(() => client.chat({ ...asked, model: "nope" })),
      no_key: await failure(() => new Ollama({ host: address }).list()),
    };
  },

  async "ai-sdk"() {
    const { generateText, generateObject, streamText, jsonSchema, tool, stepCountIs } = await load("ai");
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    const provider = createOpenAICompatible({ name: "edge_rt", baseURL: `${address}/v1`, apiKey: key, includeUsage: true, supportsStructuredOutputs: true });
    const asked = { model: provider(model), temperature: 0, maxOutputTokens: 300, maxRetries: 0 };
    const plain = await generateText({ ...asked, prompt: TEXT });
    const stream = streamText({ ...asked, prompt: TEXT });
    const streamed = await gathered(stream.textStream, (text) => text);
    const seen = [];
    const tools = { look_up: tool({ description: DESCRIPTION, inputSchema: jsonSchema(SCHEMA), execute: async (found) => (seen.push(found), "a town") }) };
    const after = await generateText({ ...asked, prompt: `So: ${CALL}`, tools, stopWhen: stepCountIs(2) });
    const formed = await generateObject({ ...asked, prompt: TEXT, schema: jsonSchema(SCHEMA) });
    return {
      text: plain.text,
      reason: plain.finishReason,
      usage: plain.usage,
      streamed,
      streamed_usage: await stream.usage,
      tool_arguments: seen,
      after: after.text,
      formed: formed.object,
      no_model: await failure(() => generateText({ ...asked, model: provider("nope"), prompt: TEXT })),
      bad_field: await failure(() => generateText({ ...asked, temperature: -1, prompt: TEXT })),
    };
  },

  async "langchain-ollama"() {
    const { ChatOllama } = await load("@langchain/ollama");
    const headers = { Authorization: `Bearer ${key}` };
    const chat = new ChatOllama({ model, baseUrl: address, headers, temperature: 0, numPredict: 200, maxRetries: 0 });
    const message = await chat.invoke(TEXT);
    const tool = { type: "function", function: { name: "look_up", description: DESCRIPTION, parameters: SCHEMA } };
    const called = await chat.bindTools([tool]).invoke(`So: ${CALL}`);
    return {
      text: message.content,
      usage: message.usage_metadata,
      streamed: await gathered(await chat.stream(TEXT), (part) => part.content),
      calls: called.tool_calls.map(({ name, args }) => ({ name, args })),
      formed: await chat.withStructuredOutput(SCHEMA, { method: "jsonSchema" }).invoke(TEXT),
    };
  },
};

for (const [name, ask] of Object.entries(clients)) {
  if (wanted.length && !wanted.includes(name)) continue;
  const outcome = await failure(async () => ({ client: name, ...(await ask()) }));
  console.log(JSON.stringify(outcome.gave ?? { client: name, failed: outcome }));
}
