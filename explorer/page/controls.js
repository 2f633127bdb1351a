// Controls that write the problem's line. The line alone says what the problem is: a control looks its word up there,
// and changes, adds or removes it.
import { element } from "./elements.js";

/** @typedef {{name: string, label: string, kind: "number" | "check" | "choice", choices?: string[], hint?: string}} Control */

/** @type {Control[]} */
export const kControls = [
  { name: "pass", label: "Pass", kind: "choice", choices: ["fwd", "bwd"] },
  { name: "dtype", label: "Type", kind: "choice", choices: ["bf16", "f16", "f32"] },
  { name: "b", label: "Sequences", kind: "number" },
  { name: "heads", label: "Query heads", kind: "number" },
  { name: "heads_k", label: "Key/value heads", kind: "number" },
  { name: "q", label: "Queries", kind: "number" },
  { name: "k", label: "Keys", kind: "number" },
  { name: "d", label: "Head dim", kind: "number" },
  { name: "causal", label: "Causal", kind: "check" },
  { name: "left", label: "Window left", kind: "number", hint: "empty: all" },
  { name: "right", label: "Window right", kind: "number", hint: "empty: all" },
  { name: "align", label: "Alignment", kind: "choice", choices: ["br", "tl"] },
  { name: "chunk", label: "Chunk", kind: "number", hint: "none" },
  { name: "sink_tokens", label: "Sink tokens", kind: "number", hint: "none" },
  { name: "tree", label: "Tree of drafts", kind: "check" },
  { name: "alibi", label: "ALiBi", kind: "check" },
  { name: "softcap", label: "Softcap", kind: "number", hint: "none" },
  { name: "sink", label: "Sink", kind: "check" },
  { name: "dropout", label: "Dropout", kind: "number", hint: "none" },
  { name: "packed", label: "Packed", kind: "check" },
  { name: "cache", label: "Cache lengths", kind: "choice", choices: ["none", "full", "after", "before"] },
  { name: "page", label: "Page size", kind: "number", hint: "rows" },
  { name: "leftpad", label: "Left padding", kind: "check" },
  { name: "deterministic", label: "Deterministic", kind: "check" },
  { name: "batch_invariant", label: "Batch invariant", kind: "check" },
];

/**
 * What a line says, by the controls' names. What it does not say is "" or false.
 * @param {string} line
 * @returns {Record<string, string | boolean>}
 */
export function readLine(line) {
  const words = line.trim().split(/\s+/);
  /** @param {string} name */
  const value = (name) => words.find((word) => word.startsWith(`${name}=`))?.slice(name.length + 1) ?? "";
  /** @param {string} name */
  const says = (name) => words.includes(name);
  const heads = value("h").split("/");
  const window = value("window").split(",");
  /** @param {string | undefined} side */
  const bound = (side) => (side === undefined || side === "-1" ? "" : side);
  return {
    pass: says("bwd") ? "bwd" : "fwd",
    dtype: ["bf16", "f16", "f32"].find(says) ?? "f32",
    b: value("b") || "1", heads: heads[0] || "1", heads_k: heads[1] ?? (heads[0] || "1"), q: value("q"), k: value("k"),
    d: value("d"), causal: says("causal"), left: bound(window[0]), right: bound(window[1]),
    align: value("align") || "br", chunk: value("chunk"), sink_tokens: value("sink_tokens"), tree: says("tree"),
    alibi: value("alibi") !== "", softcap: value("softcap"), sink: says("sink"), dropout: value("dropout"),
    packed: value("packed") !== "", cache: value("cache").split(":")[0] || "none",
    page: value("pages").split(/[x:]/)[1] ?? "", leftpad: says("leftpad"), deterministic: says("deterministic"),
    batch_invariant: says("batch_invariant"),
  };
}

/**
 * The line that says all of it. Words that no control knows stay.
 * @param {Record<string, string | boolean>} wants
 * @param {string} line  before
 */
export function writeLine(wants, line) {
  const ours = /^(fwd|bwd|bf16|f16|f32|causal|tree|sink|leftpad|deterministic|batch_invariant)$|^(b|h|q|k|window|align|chunk|sink_tokens|alibi|softcap|dropout|packed|cache|pages)=/;
  const before = line.trim().split(/\s+/);
  const value = (/** @type {string} */ name) => before.find((word) => word.startsWith(`${name}=`))?.slice(name.length + 1) ?? "";
  const others = before.filter((word) => word !== "" && !ours.test(word) && !word.startsWith("d="));
  const [b, q, k] = [Number(wants.b), Number(wants.q), Number(wants.k)];
  const words = [wants.pass, wants.dtype, `b=${wants.b}`];
  words.push(wants.heads === wants.heads_k ? `h=${wants.heads}` : `h=${wants.heads}/${wants.heads_k}`);
  words.push(`q=${wants.q}`, `k=${wants.k}`);
  // A head dim of v that differs stays as it is.
  const of_v = value("d").split("/")[1];
  words.push(of_v === undefined ? `d=${wants.d}` : `d=${wants.d}/${of_v}`);
  const cached = wants.cache !== "none";
  if (wants.packed) {
    // About three quarters of what fits, so that sequences differ.
    const part = (/** @type {number} */ length) => Math.max(1, Math.floor((b * length * 3) / 4));
    words.push(cached ? `packed=${part(q)}` : `packed=${part(q)},${part(k)}`);
  }
  if (wants.causal) words.push("causal");
  if (wants.left !== "" || wants.right !== "") words.push(`window=${wants.left || -1},${wants.right === "" ? -1 : wants.right}`);
  if (wants.align !== "br") words.push(`align=${wants.align}`);
  for (const name of ["chunk", "sink_tokens"]) if (wants[name]) words.push(`${name}=${wants[name]}`);
  if (wants.tree) words.push("tree");
  if (cached) words.push(wants.cache === "before" ? `cache=before:${value("cache").split(":")[1] ?? Math.min(q, k)}` : `cache=${wants.cache}`);
  const page = Number(wants.page);
  if (cached && page > 0) words.push(`pages=${b * Math.ceil(k / page)}x${page}`);
  if (cached && wants.leftpad) words.push("leftpad");
  for (const name of ["softcap", "dropout"]) if (wants[name]) words.push(`${name}=${wants[name]}`);
  if (wants.alibi) words.push(`alibi=${value("alibi") || "h"}`);
  for (const name of ["sink", "deterministic", "batch_invariant"]) if (wants[name]) words.push(name);
  return [...words, ...others].join(" ");
}

/** Problems worth a look. */
export const kExamples = [
  ["Prefill: causal, grouped heads", "fwd bf16 b=2 h=8/2 q=2048 k=2048 d=128 causal"],
  ["Sliding window", "fwd bf16 h=8 q=4096 k=4096 d=128 window=1023,0"],
  ["Packed documents", "fwd bf16 b=4 h=4 q=2048 k=2048 d=64 packed=5000,5000 causal"],
  ["Window with sink tokens, in a cache", "fwd bf16 b=2 h=8/2 q=64 k=4096 d=128 cache=after window=511,0 sink_tokens=16"],
  ["Decoding over pages, lengths that differ", "fwd bf16 b=16 h=32/8 q=1 k=8192 d=128 causal cache=after pages=8192x16"],
  ["Speculative decoding: a tree of drafts", "fwd bf16 b=2 h=8/2 q=16 k=1024 d=128 tree cache=after"],
  ["Long sequence, one head: not all multiprocessors", "fwd bf16 h=2 q=8192 k=8192 d=128 causal"],
  ["Training: backward, causal", "bwd bf16 b=2 h=8/2 q=2048 k=2048 d=128 causal"],
  ["ALiBi on a CPU's tiles", "fwd f32 h=4 q=512 k=512 d=64 causal alibi=h"],
];

/** The controls of a page, bound to its state. */
export class Controls {
  /** @type {Map<string, HTMLInputElement | HTMLSelectElement>} */
  #inputs = new Map();

  /**
   * @param {HTMLElement} into
   * @param {import("./state.js").State} state
   */
  constructor(into, state) {
    for (const control of kControls) {
      const input = makeInput(control);
      this.#inputs.set(control.name, input);
      input.addEventListener("input", () => state.set({ problem: writeLine(this.#wanted(), state.get("problem")) }));
      into.append(element("label", { className: control.kind }, control.label, input));
    }
  }

  /** @param {string} line */
  show(line) {
    const says = readLine(line);
    for (const [name, input] of this.#inputs) {
      if (input === document.activeElement && input.type === "number") continue; // somebody types there
      if (input.type === "checkbox") /** @type {HTMLInputElement} */ (input).checked = says[name] === true;
      else input.value = String(says[name]);
    }
  }

  #wanted() {
    return Object.fromEntries(
      [...this.#inputs].map(([name, input]) => [name, input.type === "checkbox" ? /** @type {HTMLInputElement} */ (input).checked : input.value]),
    );
  }
}

/** @param {Control} control */
function makeInput(control) {
  const id = `control-${control.name}`;
  if (control.kind === "choice") {
    return element("select", { id }, ...(control.choices ?? []).map((choice) => element("option", { value: choice }, choice)));
  }
  if (control.kind === "check") return element("input", { id, type: "checkbox" });
  return element("input", { id, type: "number", min: "0", step: "any", placeholder: control.hint ?? "" });
}
