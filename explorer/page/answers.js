// What the engine answers to the state of the page, each asked once and only when a view wants it.
import { EngineError } from "./engine.js";
import { readLine } from "./controls.js";

/** @typedef {import("./engine.js").Tile} Tile */
/** @typedef {Record<string, number>} Piece  of the order of work: its columns by name */

export class Answers {
  #engine;
  #state;
  /** @type {Map<string, unknown>} */
  #kept = new Map();

  /**
   * @param {import("./engine.js").Engine} engine
   * @param {import("./state.js").State} state
   */
  constructor(engine, state) {
    this.#engine = engine;
    this.#state = state;
  }

  devices() {
    return this.#engine.devices();
  }

  /** Why the problem is none, in the parser's words; "": it is one. */
  sentence() {
    return this.#keep(["parse"], ["problem"], () => {
      try {
        this.#engine.parse(this.#state.get("problem"));
        return "";
      } catch (error) {
        return textOf(error);
      }
    });
  }

  /** @returns {import("./engine.js").PlanAnswer} */
  plan() {
    return this.#keep(["plan"], ["problem", "device"], () => this.#engine.plan(...this.#question()));
  }

  /** Of the state's sequence and head. @returns {import("./engine.js").TilesAnswer} */
  tiles() {
    return this.#keep(["tiles"], ["problem", "device", "batch", "head", "first"], () =>
      this.#engine.tiles(...this.#question(), {
        batch: this.#state.number("batch"), head: this.#state.number("head"), first: this.#state.number("first"),
      }));
  }

  /** @returns {import("./engine.js").OrderAnswer & {items: Piece[]}} */
  order() {
    return this.#keep(["order"], ["problem", "device"], () => {
      const answer = this.#engine.order(...this.#question());
      const items = answer.list.map((row) => Object.fromEntries(answer.columns.map((name, i) => [name, row[i]])));
      return { ...answer, items };
    });
  }

  /**
   * Some queries and keys of the state's head.
   * @param {number} query
   * @param {number} key
   * @param {number} queries
   * @param {number} keys
   */
  elements(query, key, queries, keys) {
    const [batch, head] = [this.#state.number("batch"), this.#state.number("head")];
    return this.#keep(["elements", query, key, queries, keys], ["problem", "batch", "head"], () =>
      this.#engine.elements(this.#state.get("problem"), { batch, head, query, key, queries, keys }));
  }

  /** @param {number[]} seqlens */
  bytes(seqlens) {
    return this.#keep(["bytes", ...seqlens], ["problem", "device"], () => this.#engine.bytes(...this.#question(), seqlens));
  }

  /**
   * @param {number[]} scores
   * @param {{values?: number[], block?: number, slack?: number}} fields
   */
  softmax(scores, fields) {
    return this.#engine.softmax(scores, fields);
  }

  /** Pieces of the order that work on the state's sequence and head. */
  piecesOfHead() {
    return this.#keep(["pieces"], ["problem", "device", "batch", "head"], () => {
      const heads = Number(readLine(this.#state.get("problem")).heads);
      const unit = Math.floor((this.#state.number("head") * (this.plan().work?.heads ?? 1)) / heads);
      const batch = this.#state.number("batch");
      return this.order().items.filter(
        (item) => item.batch === batch && item.head <= unit && unit < item.head + item.heads && !item.prepares,
      );
    });
  }

  /**
   * The piece that computes a tile; none where nobody does.
   * @param {Tile} tile
   */
  pieceOf([firstRow, endRow, firstKey, endKey]) {
    return this.piecesOfHead().find(
      (item) => item.first_row < endRow && firstRow < item.end_row && item.first_key < endKey && firstKey < item.end_key,
    );
  }

  /** @returns {[string, string]} */
  #question() {
    return [this.#state.get("problem"), this.#state.get("device")];
  }

  /**
   * @template T
   * @param {(string | number)[]} what
   * @param {(keyof import("./state.js").Fields)[]} fields  that the answer depends on
   * @param {() => T} ask
   * @returns {T}
   */
  #keep(what, fields, ask) {
    const name = JSON.stringify([what, fields.map((field) => this.#state.get(field))]);
    if (!this.#kept.has(name)) {
      if (this.#kept.size > 60) this.#kept.clear();
      this.#kept.set(name, ask());
    }
    return /** @type {T} */ (this.#kept.get(name));
  }
}

/**
 * What the engine says of a request that it cannot answer. Anything else is a fault of the page.
 * @param {unknown} error
 */
export function textOf(error) {
  if (error instanceof EngineError) return error.message;
  throw error;
}
