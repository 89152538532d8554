// Clients from npm, asking a server: `node peers.mjs WHAT URL MODEL` prints, as one line of JSON, what
// they make of its answers. What ends in `Story` expects the answers of `STORY` in
// `test_server_peers.py`: two calls of the tool `add`, then an end.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import * as agents from "@openai/agents";
import { generateText, streamText } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [what, url, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const prompt = "Anna is 31 years old. Who is she, and how old?";
const messages = [{ role: "user", content: prompt }];
const person = z.object({ name: z.enum(["Anna", "Berta"]), age: z.literal([30, 31]) });
const numbers = z.object({ a: z.number(), b: z.number() });
const made = [];
const execute = ({ a, b }) => (made.push(a + b), String(a + b));

async function texts() {
  const own = createOpenAICompatible({ name: "own", baseURL: `${url}/v1` });
  const asked = { model, messages, max_tokens: 12 };
  const given = { model: own.chatModel(model), prompt, maxOutputTokens: 12 };
  return {
    whole: (await openai.chat.completions.create(asked)).choices[0].message.content,
    streamed: await openai.chat.completions.stream(asked).finalContent(),
    generated: (await generateText(given)).text,
    read: await streamText(given).text,
    message: (await anthropic.messages.create(asked)).content[0].text,
    events: await anthropic.messages.stream(asked).finalText(),
  };
}

async function forced() {
  const tell = zodFunction({ name: "tell", description: "tells", parameters: person });
  const called = { model, messages, tools: [tell], tool_choice: "required", parallel_tool_calls: false };
  const typed = { model, messages, response_format: zodResponseFormat(person, "person") };
  const told = { model, input: prompt, text: { format: zodTextFormat(person, "person") } };
  const meant = { model, messages, max_tokens: 200, output_config: { format: zodOutputFormat(person) } };
  const first = async (reply) => (await reply).choices[0].message;
  return {
    called: (await first(openai.chat.completions.parse(called))).tool_calls[0].function.parsed_arguments,
    typed: (await first(openai.chat.completions.parse(typed))).parsed,
    streamed: (await first(openai.chat.completions.stream(typed).finalChatCompletion())).parsed,
    told: (await openai.responses.parse(told)).output_parsed,
    events: (await openai.responses.stream(told).finalResponse()).output_parsed,
    meant: (await anthropic.messages.parse(meant)).parsed_output,
  };
}

async function runnerStory(stream) {
  const tools = [{ type: "function", function: { name: "add", description: "adds", parse: JSON.parse,
    function: execute, parameters: z.toJSONSchema(numbers) } }];
  return await openai.chat.completions.runTools({ model, messages, tools, stream }).finalContent();
}

/** By a thread, which the server refuses, and without one. */
async function anthropicStory(stream, thread) {
  const add = betaZodTool({ name: "add", description: "adds", inputSchema: numbers, run: execute });
  const asked = { model, messages, max_tokens: 200, tools: [add], stream };
  const runner = anthropic.beta.messages.toolRunner(thread ? asked : { ...asked, thread: false });
  if (stream) for await (const events of runner) await events.finalMessage();
  return (await runner.runUntilDone()).content[0].text;
}

async function agentsStory(api) {
  agents.setTracingDisabled(true);
  agents.setOpenAIAPI(api);
  agents.setDefaultOpenAIClient(openai);
  const add = agents.tool({ name: "add", description: "adds", parameters: numbers, execute });
  const agent = new agents.Agent({ name: "adder", model, tools: [add] });
  const run = (await agents.run(agent, prompt)).finalOutput;
  const streamed = await agents.run(agent, prompt, { stream: true });
  await streamed.completed;
  return { run, streamed: streamed.finalOutput };
}

async function stories() {
  const said = {};
  for (const stream of [false, true]) {
    said[`runTools ${stream}`] = await runnerStory(stream);
    for (const thread of [true, false])
      said[`toolRunner ${stream} ${thread}`] = await anthropicStory(stream, thread);
  }
  for (const api of ["chat_completions", "responses"])
    for (const [how, text] of Object.entries(await agentsStory(api))) said[`${api} ${how}`] = text;
  return { ...said, made };
}

console.log(JSON.stringify(await { texts, forced, stories }[what]()));
