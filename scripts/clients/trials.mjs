// Tries the Node programs that speak with gateways: `node trials.mjs URL MODEL ANSWER`, in a folder with package.json's packages.
// Prints a line of JSON for each trial: the program, what was tried, and why it failed (null if it did not).

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtemp, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { promisify } from "node:util";

const [url, model, answer] = process.argv.slice(2);
const hello = "Once upon a time";
const said = [{ role: "user", content: hello }];
const city = {
  type: "object",
  properties: { city: { enum: ["Bern", "Basel"] } },
  required: ["city"],
  additionalProperties: false,
};
const few = 12; // tokens of an answer
const run = promisify(execFile);

const trials = {
  openai: {
    "chat, stream, tools, responses, embeddings": async () => {
      const { default: OpenAI } = await import("openai");
      const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
      let text = "";
      const stream = await client.chat.completions.create({ model, messages: said, max_tokens: few, stream: true });
      for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
      assert.ok(text);
      const tools = [{ type: "function", function: { name: "weather", parameters: city } }];
      const called = await client.chat.completions.create({ model, messages: said, tools, tool_choice: "required" });
      assert.ok(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city);
      const first = await client.responses.create({ model, input: hello, max_output_tokens: few });
      const more = { model, input: "And then?", previous_response_id: first.id, max_output_tokens: few, stream: true };
      let last;
      for await (const event of await client.responses.create(more)) last = event;
      assert.match(last.type, /^response.(completed|incomplete)$/);
      const { data } = await client.embeddings.create({ model, input: [hello] });
      assert.ok(data[0].embedding.length > 0);
    },
  },
  "@anthropic-ai/sdk": {
    "messages, stream, tools": async () => {
      const { default: Anthropic } = await import("@anthropic-ai/sdk");
      const client = new Anthropic({ baseURL: url, apiKey: "none" });
      const message = await client.messages.stream({ model, messages: said, max_tokens: few }).finalMessage();
      assert.ok(message.content[0].text);
      const tools = [{ name: "weather", input_schema: city }];
      const asked = { model, messages: said, max_tokens: 200, tools, tool_choice: { type: "any" } };
      assert.ok((await client.messages.create(asked)).content.at(-1).input.city);
    },
  },
  ollama: {
    "chat, generate, stream, list": async () => {
      const { Ollama } = await import("ollama");
      const client = new Ollama({ host: url });
      assert.equal((await client.list()).models[0].model, model);
      let text = "";
      const options = { num_predict: few };
      for await (const part of await client.chat({ model, messages: said, stream: true, options })) {
        text += part.message.content;
      }
      assert.ok(text);
      assert.ok((await client.generate({ model, prompt: hello, options })).response);
    },
  },
  "ai (Vercel)": {
    "@ai-sdk/openai-compatible: text, stream, object": async () => {
      const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
      const provider = createOpenAICompatible({
        name: "swarm",
        baseURL: `${url}/v1`,
        apiKey: "none",
        supportsStructuredOutputs: true,
      });
      await generations(provider(model));
    },
    "@ai-sdk/openai (responses): text, stream, object, steps with a tool": async () => {
      const { createOpenAI } = await import("@ai-sdk/openai");
      const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
      await generations(provider(model));
      await steps(provider(model));
    },
    "@ai-sdk/anthropic: text, stream, steps with a tool": async () => {
      const { createAnthropic } = await import("@ai-sdk/anthropic");
      const chosen = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })(model);
      const { streamText } = await import("ai");
      assert.ok(await streamText({ model: chosen, prompt: hello, maxOutputTokens: few }).text);
      await steps(chosen);
    },
  },
  "@openai/codex": {
    "codex exec, by responses": async () => {
      const home = await mkdtemp(join(tmpdir(), "codex-"));
      await writeFile(
        join(home, "config.toml"),
        `model = "${model}"\nmodel_provider = "swarm"\nweb_search = "disabled"\n` +
          `[model_providers.swarm]\nname = "swarm"\nbase_url = "${url}/v1"\nwire_api = "responses"\n`,
      );
      await program("codex", ["exec", "--skip-git-repo-check", hello], home, { CODEX_HOME: home });
    },
  },
  "@anthropic-ai/claude-code": {
    "claude --print, by messages": async () => {
      const home = await mkdtemp(join(tmpdir(), "claude-"));
      await program("claude", ["--print", "--model", model, hello], home, {
        HOME: home,
        ANTHROPIC_BASE_URL: url,
        ANTHROPIC_AUTH_TOKEN: "none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
      });
    },
  },
  "opencode-ai": {
    "opencode run, by chat completions": async () => {
      const home = await mkdtemp(join(tmpdir(), "opencode-"));
      const models = { [model]: { limit: { context: 200000, output: 1000 } } };
      const provider = { npm: "@ai-sdk/openai-compatible", options: { baseURL: `${url}/v1`, apiKey: "none" }, models };
      await writeFile(join(home, "opencode.json"), JSON.stringify({ provider: { swarm: provider } }));
      await program("opencode", ["run", "--model", `swarm/${model}`, hello], home, { HOME: home });
    },
  },
};

async function generations(chosen) {
  const { generateText, jsonSchema, Output, streamText } = await import("ai");
  assert.ok((await generateText({ model: chosen, prompt: hello, maxOutputTokens: few })).text);
  assert.ok(await streamText({ model: chosen, prompt: hello, maxOutputTokens: few }).text);
  const output = Output.object({ schema: jsonSchema(city) });
  assert.ok((await generateText({ model: chosen, prompt: hello, output })).output.city);
}

async function steps(chosen) {
  const { generateText, jsonSchema, stepCountIs, tool } = await import("ai");
  const weather = tool({ inputSchema: jsonSchema(city), execute: async () => "12 degrees" });
  const done = await generateText({
    model: chosen,
    prompt: hello,
    tools: { weather },
    maxOutputTokens: 300,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  });
  assert.equal(done.steps.length, 2);
  assert.ok(done.steps[0].toolResults.length > 0);
}

async function program(name, args, cwd, env) {
  const path = join(process.cwd(), "node_modules", ".bin", name);
  const pending = run(path, args, { cwd, env: { ...process.env, PWD: cwd, ...env }, timeout: 300_000 });
  pending.child.stdin.end();
  assert.ok((await pending).stdout.includes(answer));
}

for (const [program, its] of Object.entries(trials)) {
  for (const [what, attempt] of Object.entries(its)) {
    let failure = null;
    try {
      await attempt();
    } catch (error) {
      failure = `${error.name}: ${error.message} ${error.stderr ?? ""}`.slice(0, 1000);
    }
    console.log(JSON.stringify({ program, what, failure }));
  }
}
process.exit();
