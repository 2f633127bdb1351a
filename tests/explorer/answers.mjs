// The engine as a page has it: a request a line in, an answer a line out.
//
//   node answers.mjs ENGINE.JS ENGINE.WASM
import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [script, module] = process.argv.slice(2);
const { EngineError, load, requestOf } = await import(pathToFileURL(script).href);
const engine = await load({ base64: readFileSync(module).toString("base64") });

// What the functions of the module make of answers, as of bytes that no base64 was made of.
const second = await load(readFileSync(module));
const problem = "fwd  bf16 q=64 k=64 d=64 b=1";
const order = second.order(problem, "h200", { seqlens_q: undefined });
const softmax = second.softmax([1, -Infinity, 2.5], { block: 2, values: [1, 2, 3], sink: 0.5 });
let refused = null;
try {
  second.tiles("fwd d=x", "h200");
} catch (error) {
  refused = error;
}
const checks = {
  devices: second.devices().some((device) => device.name === "rtx-4090" && device.gpu),
  parse: second.parse(problem) === "fwd bf16 b=1 h=1 q=64 k=64 d=64",
  plan: second.plan(problem, "h200").rows.filter((row) => row.chosen).length === 1,
  tiles: second.tiles(problem, "h200", { head: 0 }).list.length === 1,
  elements: second.elements(problem, { queries: 2, keys: 3 }).visible.join() === "111,111",
  order: order.list.length === order.pieces && order.columns.length === order.list[0].length,
  bytes: second.bytes(problem, "h200", [64, 128]).levels.map((level) => level.list.length).join() === "2,2",
  softmax: softmax.base2_scores[1] === null && softmax.blocks.length === 2,
  error: refused instanceof EngineError && refused.code === "invalid" && refused.message.includes("'d=x'"),
  request: requestOf("bytes", "a\tb", "c", { seqlens: [1, 2] }) === "bytes\ta b\tc\tseqlens=1,2",
};
const wrong = Object.keys(checks).filter((name) => !checks[name]);
if (wrong.length > 0) {
  console.error(`engine.js: wrong: ${wrong.join(", ")}`);
  process.exit(1);
}

const lines = readFileSync(0, "utf8").split("\n").slice(0, -1);
writeFileSync(1, lines.map((line) => engine.answer(line) + "\n").join(""));
