// The mask as the kernel sees it: tiles that are skipped, masked or full, how far the work has come, and the elements
// of the tile that is looked at.
import { colours, counted, element, pointed, prepare, rangeText, whole } from "./elements.js";

/** @typedef {import("./engine.js").Tile} Tile */

const kCovers = ["skipped", "masked", "full"];
const kShown = 32; // queries and keys of the elements' picture

export class MaskView {
  #state;
  #answers;
  #canvas = element("canvas", { tabIndex: 0, role: "img" });
  #counts = element("p");
  #told = element("p", { className: "told", "aria-live": "polite" });
  #elements = element("canvas", { role: "img", className: "elements" });
  #elementsTold = element("p");
  #batch;
  #head;
  #more = element("span");
  /** @type {Tile[]} */
  #tiles = [];

  /**
   * @param {HTMLElement} section
   * @param {import("./state.js").State} state
   * @param {import("./answers.js").Answers} answers
   */
  constructor(section, state, answers) {
    this.#state = state;
    this.#answers = answers;
    this.#batch = this.#numberOf("batch", "Sequence");
    this.#head = this.#numberOf("head", "Query head");
    section.append(
      element("div", { className: "row" }, this.#batch.label, this.#head.label, this.#more),
      legend(),
      this.#counts,
      this.#canvas,
      this.#told,
      element("h2", {}, "Elements of the tile"),
      this.#elements,
      this.#elementsTold,
    );
    this.#canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#tell(this.#at(event)));
    this.#canvas.addEventListener("click", (/** @type {PointerEvent} */ event) => this.#look(this.#at(event)));
    this.#canvas.addEventListener("pointerleave", () => this.#tell(this.#looked()));
    this.#canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => this.#move(event));
  }

  draw() {
    this.#batch.input.value = this.#state.get("batch");
    this.#head.input.value = this.#state.get("head");
    const answer = this.#answers.tiles();
    this.#tiles = answer.list.flatMap((piece) => piece.tiles);
    const { skipped, masked, full } = answer.counts;
    const all = Math.max(skipped + masked + full, 1);
    this.#counts.textContent =
      `${answer.kernel}: ${counted(answer.seqlen_q, "query").replace("querys", "queries")}, ` +
      `${counted(answer.seqlen_k, "key")}; tiles of ${answer.tile_rows} rows and ${answer.block_n} keys. ` +
      `Skipped ${whole(skipped)}, masked ${whole(masked)}, full ${whole(full)}: ` +
      `${((100 * (masked + full)) / all).toFixed(1)} % of the tiles are computed.` +
      (answer.row_heads > 1 ? ` ${answer.row_heads} query heads share the rows: row r is query floor(r / ${answer.row_heads}).` : "");
    this.#drawMore(answer);
    this.#drawTiles(answer);
    this.#tell(this.#looked());
    this.#drawElements(answer);
  }

  // ---- tiles ----

  /** The rows that are shown: all, or those of the pieces in the answer. */
  #rows() {
    const answer = this.#answers.tiles();
    if (!answer.cut && answer.first === 0) return { begin: 0, end: answer.rows };
    return {
      begin: Math.min(...this.#tiles.map((tile) => tile[0])),
      end: Math.max(...this.#tiles.map((tile) => tile[1])),
    };
  }

  /** @param {import("./engine.js").TilesAnswer} answer */
  #drawTiles(answer) {
    const rows = this.#rows();
    const width = this.#canvas.clientWidth || 600;
    const height = Math.min(Math.max((width * (rows.end - rows.begin)) / Math.max(answer.seqlen_k * answer.row_heads, 1), 90), 640);
    const context = prepare(this.#canvas, width, height);
    const colour = colours();
    const x = (/** @type {number} */ key) => (key / Math.max(answer.seqlen_k, 1)) * width;
    const y = (/** @type {number} */ row) => ((row - rows.begin) / Math.max(rows.end - rows.begin, 1)) * height;
    const order = this.#answers.order();
    const now = this.#state.number("time") * order.end;
    for (const tile of this.#tiles) {
      const [firstRow, endRow, firstKey, endKey, cover] = tile;
      const box = /** @type {const} */ ([x(firstKey), y(firstRow), x(endKey) - x(firstKey), y(endRow) - y(firstRow)]);
      const piece = cover === 0 ? undefined : this.#answers.pieceOf(tile);
      context.globalAlpha = piece && piece.end > now ? 0.25 : 1;
      context.fillStyle = piece && piece.start <= now && now < piece.end ? colour.running : colour[kCovers[cover]];
      if (piece && piece.start <= now && now < piece.end) context.globalAlpha = 1;
      context.fillRect(...box);
      context.globalAlpha = 1;
      if (box[2] > 3 && box[3] > 3 && cover !== 0) {
        context.strokeStyle = colour.page;
        context.lineWidth = 0.5;
        context.strokeRect(...box);
      }
    }
    const looked = this.#looked();
    if (looked) {
      context.strokeStyle = colour.accent;
      context.lineWidth = 2.5;
      context.strokeRect(x(looked[2]), y(looked[0]), Math.max(x(looked[3]) - x(looked[2]), 3), Math.max(y(looked[1]) - y(looked[0]), 3));
    }
    const { skipped, masked, full } = answer.counts;
    this.#canvas.setAttribute(
      "aria-label",
      `Tiles of sequence ${answer.batch}, head ${answer.head}: ${skipped} skipped, ${masked} masked, ${full} full. Arrow keys go from tile to tile.`,
    );
  }

  /** Where not all pieces fit into an answer: which are shown. @param {import("./engine.js").TilesAnswer} answer */
  #drawMore(answer) {
    this.#more.replaceChildren();
    if (!answer.cut && answer.first === 0) return;
    const go = (/** @type {string} */ text, /** @type {number | undefined} */ first) =>
      element("button", { type: "button", disabled: first === undefined, onclick: () => this.#state.set({ first: String(first), row: "", key: "" }) }, text);
    this.#more.append(
      `pieces from ${whole(answer.first)} on, of ${whole(answer.pieces)} `,
      go("first", answer.first > 0 ? 0 : undefined),
      go("further", answer.next),
    );
  }

  /** @param {PointerEvent} event */
  #at(event) {
    const rows = this.#rows();
    const at = pointed(this.#canvas, event);
    const row = rows.begin + at.y * (rows.end - rows.begin);
    const key = at.x * this.#answers.tiles().seqlen_k;
    return this.#tileAt(row, key);
  }

  /** @param {number} row @param {number} key */
  #tileAt(row, key) {
    return this.#tiles.find((tile) => tile[0] <= row && row < tile[1] && tile[2] <= key && key < tile[3]);
  }

  /** The tile of the state: the one that was chosen, or the first that is computed. */
  #looked() {
    if (this.#state.get("row") !== "") {
      const chosen = this.#tileAt(this.#state.number("row"), this.#state.number("key"));
      if (chosen) return chosen;
    }
    return this.#tiles.find((tile) => tile[4] === 1) ?? this.#tiles.find((tile) => tile[4] === 2) ?? this.#tiles[0];
  }

  /** @param {Tile | undefined} tile */
  #look(tile) {
    if (tile) this.#state.set({ row: String(tile[0]), key: String(tile[2]) });
  }

  /** @param {KeyboardEvent} event */
  #move(event) {
    const tile = this.#looked();
    if (!tile) return;
    /** @type {Record<string, [number, number]>} */
    const places = {
      ArrowLeft: [tile[0], tile[2] - 1], ArrowRight: [tile[0], tile[3]],
      ArrowUp: [tile[0] - 1, tile[2]], ArrowDown: [tile[1], tile[2]],
    };
    const place = places[event.key];
    if (!place) return;
    event.preventDefault();
    this.#look(this.#tileAt(...place));
  }

  /** @param {Tile | undefined} tile */
  #tell(tile) {
    if (!tile) {
      this.#told.textContent = "There is no tile: nobody sees a key.";
      return;
    }
    const answer = this.#answers.tiles();
    const order = this.#answers.order();
    const [firstRow, endRow, firstKey, endKey, cover] = tile;
    const queries = rangeText(Math.floor(firstRow / answer.row_heads), Math.floor((endRow - 1) / answer.row_heads) + 1);
    let text = `Rows ${rangeText(firstRow, endRow)} (queries ${queries}), keys ${rangeText(firstKey, endKey)}: ${kCovers[cover]}.`;
    const piece = cover === 0 ? undefined : this.#answers.pieceOf(tile);
    if (piece) {
      text += ` Piece ${whole(piece.index)} of ${whole(order.pieces)}, ${order.worker} ${piece.worker}, ` +
        `cycles ${whole(piece.start)} to ${whole(piece.end)}.`;
    }
    this.#told.textContent = text;
  }

  // ---- elements ----

  /** @param {import("./engine.js").TilesAnswer} answer */
  #drawElements(answer) {
    const tile = this.#looked();
    this.#elements.hidden = !tile;
    this.#elementsTold.textContent = "";
    if (!tile) return;
    const query = Math.floor(tile[0] / answer.row_heads);
    // Of a masked tile the part where the mask is: at its end, for causal masks and windows.
    const queries = Math.min(kShown, answer.seqlen_q - query);
    const key = Math.max(Math.min(tile[2], answer.seqlen_k - kShown), 0);
    const keys = Math.min(kShown, answer.seqlen_k - key);
    const seen = this.#answers.elements(query, key, queries, keys);
    const colour = colours();
    const size = Math.max(8, Math.min(18, (this.#elements.parentElement?.clientWidth ?? 400) / Math.max(keys, 1) - 1));
    this.#elements.style.width = `${size * keys}px`;
    const context = prepare(this.#elements, size * keys, size * queries);
    const steepest = Math.max(...(seen.alibi ?? [[0]]).flat().map(Math.abs), 1e-30);
    seen.visible.forEach((line, i) => {
      for (let j = 0; j < line.length; ++j) {
        const visible = line[j] === "1";
        context.fillStyle = visible ? colour.full : colour.skipped;
        // ALiBi: the further away, the fainter.
        context.globalAlpha = visible && seen.alibi ? 1 - 0.8 * Math.abs(seen.alibi[i][j] / steepest) : 1;
        context.fillRect(j * size, i * size, size - 1, size - 1);
        context.globalAlpha = 1;
        if (visible && seen.kept && seen.kept[i][j] === "0") {
          context.strokeStyle = colour.ink;
          context.beginPath();
          context.moveTo(j * size + 2, i * size + 2);
          context.lineTo((j + 1) * size - 3, (i + 1) * size - 3);
          context.stroke();
        }
      }
    });
    const count = seen.visible.join("").split("1").length - 1;
    let text = `Queries ${rangeText(query, query + queries)}, keys ${rangeText(key, key + keys)}: ${whole(count)} of ${whole(queries * keys)} are seen.`;
    if (seen.alibi) text += ` ALiBi's slope is ${seen.alibi_slope}; paler is lower.`;
    if (seen.kept) text += " A stroke marks what dropout drops.";
    if (answer.pages) {
      const page = answer.pages[Math.floor(key / (answer.page_size ?? 1)) - (answer.first_page ?? 0)];
      text += ` Key ${whole(key)} lies in page ${page}, row ${whole(seen.rows_of_k[0])} of the cache.`;
    }
    this.#elementsTold.textContent = text;
    this.#elements.setAttribute("aria-label", text);
  }

  /** @param {"batch" | "head"} name @param {string} text */
  #numberOf(name, text) {
    const input = element("input", {
      type: "number", min: "0", step: "1", id: `mask-${name}`,
      oninput: () => this.#state.set({ [name]: input.value || "0", first: "0", row: "", key: "" }),
    });
    return { input, label: element("label", {}, text, input) };
  }
}

function legend() {
  const entry = (/** @type {string} */ name, /** @type {string} */ text) =>
    element("li", {}, element("span", { className: `swatch ${name}` }), text);
  return element("ul", { className: "legend" },
    entry("skipped", "skipped: no key is seen, nothing is loaded"),
    entry("masked", "masked: some keys are hidden"),
    entry("full", "full: no mask is applied"),
    entry("running", "being computed at the time that Order shows"));
}
