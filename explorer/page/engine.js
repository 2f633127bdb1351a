// The explorer's engine: the library's planner and its arithmetic, compiled to WebAssembly. One
// instance answers everything at once; nothing here decides anything.

/** @typedef {"devices" | "parse" | "plan" | "tiles" | "elements" | "order" | "bytes" | "softmax"} Command */

/**
 * Fields of a request besides problem and device; engine/engine.h says which command has which.
 * @typedef {Record<string, number | string | readonly number[]>} Fields
 */

/**
 * @typedef {object} DeviceFacts
 * @property {string} name
 * @property {string} arch
 * @property {boolean} gpu
 * @property {number} workers  multiprocessors, or cores
 * @property {number} l1_bytes  of a core; GPU: shared memory of a block
 * @property {number} l2_bytes  of a core; GPU: all of it
 */

/**
 * @typedef {object} CatalogRow
 * @property {string} name
 * @property {"tile" | "decode"} form
 * @property {number} block_m
 * @property {number} tile_m
 * @property {number} block_n
 * @property {number} [cost]  cycles, of a row that takes the problem
 * @property {string} [refusal]  why it does not
 * @property {boolean} chosen
 */

/**
 * @typedef {object} PlanAnswer
 * @property {string} problem
 * @property {string} device
 * @property {string} text  what `tessera plan` prints
 * @property {string | null} kernel  null: none takes the problem
 * @property {string} [invalid]  why the problem makes no sense; then there are no rows
 * @property {CatalogRow[]} [rows]
 * @property {{items: number, batch: number, heads: number, row_heads: number, blocks: number, block_m: number,
 *   splits: number, split_n: number, section: number}} [work]
 * @property {number} [workspace_bytes]
 * @property {{name: string, offset: number, bytes: number}[]} [workspace]
 */

/**
 * A run of rows, a run of keys, and what the kernel does there: 0 skips, 1 masks, 2 needs no mask.
 * @typedef {[firstRow: number, endRow: number, firstKey: number, endKey: number, cover: 0 | 1 | 2]} Tile
 */

/**
 * @typedef {object} TilesAnswer
 * @property {string} kernel
 * @property {number} batch
 * @property {number} head  the query head
 * @property {number} seqlen_q
 * @property {number} seqlen_k
 * @property {number} rows  of the axis of rows: row r is query floor(r / row_heads)
 * @property {number} row_heads  query heads that share the axis
 * @property {number} item_rows  rows of a forward's piece
 * @property {number} tile_rows  rows that meet a block of keys together
 * @property {number} block_m
 * @property {number} block_n
 * @property {number} pieces  all of the head
 * @property {{block: number, split: number, tiles: Tile[]}[]} list
 * @property {{skipped: number, masked: number, full: number}} counts  of what is listed, in blocks
 * @property {boolean} cut
 * @property {number} [next]  the piece to go on with, as the field `first`
 * @property {number[]} [pages]  of the sequence's keys, from first_page on
 * @property {number} [page_size]
 * @property {number} [first_page]
 */

/**
 * @typedef {object} ElementsAnswer
 * @property {number} query  the first
 * @property {number} key  the first
 * @property {string[]} visible  a line a query; a character a key: 1, or 0 where the mask hides it
 * @property {number[][]} [alibi]  what is added to base-2 scores
 * @property {number} [alibi_slope]
 * @property {string[]} [kept]  by dropout
 * @property {number[]} rows_of_k  where each key lies, in rows of k
 */

/**
 * @typedef {object} OrderAnswer
 * @property {string} kernel
 * @property {"rounds" | "counter" | "spans"} dealing  each worker knows its own pieces; whoever is free takes the
 *   next; equal spans of all work
 * @property {"multiprocessor" | "multiprocessor pair" | "core"} worker
 * @property {number} workers
 * @property {number} resident  pieces that a worker has at once
 * @property {number} pieces  all; of spans those in the list
 * @property {boolean} cut  times are those of the list
 * @property {number} end  cycles
 * @property {number} first_idle  when the first worker has no more to do
 * @property {number} busy  cycles of all workers
 * @property {number} idle
 * @property {number} last_round  pieces that end after first_idle
 * @property {string[]} columns  of each of the list
 * @property {number[][]} list
 */

/**
 * @typedef {object} BytesAnswer
 * @property {{name: string, source: string, bytes: number, refusal?: string,
 *   list: {seqlen: number, standard: number, tiled: number, block: number}[]}[]} levels  fast memories, the nearest
 *   first: their bytes, and what comes into them from `source`
 * @property {{keys: number, used: number, bytes: number, read: number, page_size: number, pages: number,
 *   num_pages: number} | null} cache  of all heads of one layer, in bytes: of the keys that sequences hold, of all
 *   slots, of the keys that queries see; pages that hold keys, where there are pages
 */

/**
 * null stands for minus infinity.
 * @typedef {object} SoftmaxAnswer
 * @property {number} slack
 * @property {number} cpu_slack
 * @property {number} gpu_slack
 * @property {(number | null)[]} base2_scores
 * @property {{begin: number, end: number, greatest: number | null, reference: number | null, raised: boolean,
 *   rescaled: boolean, factor: number, weights: number[], sum: number, output: number}[]} blocks
 * @property {{output: number, lse: number | null}} online
 * @property {{greatest: number | null, sum: number, weights: number[], output: number, lse: number | null}} three_steps
 */

/** A request that cannot be answered, in the library's own words. */
export class EngineError extends Error {
  /**
   * @param {string} code  "invalid", "unsupported"
   * @param {string} text
   */
  constructor(code, text) {
    super(text);
    this.name = "EngineError";
    this.code = code;
  }
}

/**
 * @typedef {object} Exports
 * @property {WebAssembly.Memory} memory
 * @property {() => void} _initialize
 * @property {(bytes: number) => number} request
 * @property {() => number} answer
 * @property {() => number} answer_bytes
 */

const kEncoder = new TextEncoder();
const kDecoder = new TextDecoder();

/** The engine; load() makes one. */
export class Engine {
  /** @type {Exports} */
  #exports;

  /** @param {WebAssembly.Instance} instance */
  constructor(instance) {
    this.#exports = /** @type {Exports} */ (/** @type {unknown} */ (instance.exports));
    this.#exports._initialize();
  }

  /**
   * One line in, one line of JSON out: engine/request.h.
   * @param {string} request
   * @returns {string}
   */
  answer(request) {
    const bytes = kEncoder.encode(request);
    const at = this.#exports.request(bytes.length);
    new Uint8Array(this.#exports.memory.buffer, at, bytes.length).set(bytes);
    const reply = this.#exports.answer();
    return kDecoder.decode(new Uint8Array(this.#exports.memory.buffer, reply, this.#exports.answer_bytes()));
  }

  /** @returns {DeviceFacts[]} */
  devices() {
    return this.#ask("devices").devices;
  }

  /**
   * The problem in its shortest form.
   * @param {string} problem
   * @returns {string}
   */
  parse(problem) {
    return this.#ask("parse", problem).problem;
  }

  /**
   * @param {string} problem
   * @param {string} device
   * @returns {PlanAnswer}
   */
  plan(problem, device) {
    return this.#ask("plan", problem, device);
  }

  /**
   * @param {string} problem
   * @param {string} device
   * @param {Fields} [fields]
   * @returns {TilesAnswer}
   */
  tiles(problem, device, fields) {
    return this.#ask("tiles", problem, device, fields);
  }

  /**
   * @param {string} problem
   * @param {Fields} [fields]
   * @returns {ElementsAnswer}
   */
  elements(problem, fields) {
    return this.#ask("elements", problem, "", fields);
  }

  /**
   * @param {string} problem
   * @param {string} device
   * @param {Fields} [fields]
   * @returns {OrderAnswer}
   */
  order(problem, device, fields) {
    return this.#ask("order", problem, device, fields);
  }

  /**
   * @param {string} problem
   * @param {string} device
   * @param {readonly number[]} seqlens
   * @returns {BytesAnswer}
   */
  bytes(problem, device, seqlens) {
    return this.#ask("bytes", problem, device, { seqlens });
  }

  /**
   * Minus infinity is a score that the mask hides.
   * @param {readonly number[]} scores  natural logarithms
   * @param {{values?: readonly number[], block?: number, slack?: number, sink?: number}} [fields]
   * @returns {SoftmaxAnswer}
   */
  softmax(scores, fields) {
    return this.#ask("softmax", "", "", { scores, ...fields });
  }

  /**
   * @param {Command} command
   * @param {string} [problem]
   * @param {string} [device]
   * @param {Fields} [fields]
   */
  #ask(command, problem = "", device = "", fields = {}) {
    const answer = JSON.parse(this.answer(requestOf(command, problem, device, fields)));
    if (answer.error) throw new EngineError(answer.error.code, answer.error.text);
    return answer;
  }
}

/**
 * The line that asks for it.
 * @param {Command} command
 * @param {string} [problem]
 * @param {string} [device]
 * @param {Fields} [fields]
 * @returns {string}
 */
export function requestOf(command, problem = "", device = "", fields = {}) {
  const words = [command, problem, device].map((word) => word.replace(/[\t\n]/g, " "));
  for (const [name, value] of Object.entries(fields)) {
    if (value !== undefined) words.push(`${name}=${[value].flat().map(textOf).join(",")}`);
  }
  return words.join("\t");
}

/** @param {number | string} value */
function textOf(value) {
  if (typeof value === "string") return value.replace(/[\t\n]/g, " ");
  return value === -Infinity ? "-inf" : String(value);
}

/**
 * Loads the module. A page opened from a folder cannot fetch it; it has the bytes in itself, as base64.
 * @param {string | URL | BufferSource | {base64: string}} source  where it is, its bytes, or these
 * @returns {Promise<Engine>}
 */
export async function load(source) {
  const module = await WebAssembly.compile(await bytesOf(source));
  return new Engine(await WebAssembly.instantiate(module, importsOf(module)));
}

/**
 * @param {string | URL | BufferSource | {base64: string}} source
 * @returns {Promise<BufferSource>}
 */
async function bytesOf(source) {
  if (typeof source === "string" || source instanceof URL) {
    const response = await fetch(source);
    if (!response.ok) throw new Error(`${source}: ${response.status} ${response.statusText}`);
    return response.arrayBuffer();
  }
  if ("base64" in source) return Uint8Array.from(atob(source.base64), (character) => character.charCodeAt(0));
  return source;
}

/**
 * What the module's C library would ask of a system: to print why it stops, and to stop. There is none, so every call
 * is one too many.
 * @param {WebAssembly.Module} module
 * @returns {WebAssembly.Imports}
 */
function importsOf(module) {
  /** @type {Record<string, Record<string, () => never>>} */
  const imports = {};
  for (const { module: from, name } of WebAssembly.Module.imports(module)) {
    (imports[from] ??= {})[name] = () => {
      throw new Error(`the engine has stopped: it called ${name}`);
    };
  }
  return imports;
}
