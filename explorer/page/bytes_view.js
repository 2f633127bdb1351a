// Bytes that attention moves, tiled and in three steps, over the length of a sequence.
import { bytesText, element, svg, whole } from "./elements.js";

const kSeqlens = Array.from({ length: 11 }, (_, i) => 128 * 2 ** i);
const kWidth = 720, kHeight = 320, kLeft = 70, kBottom = 34;

export class BytesView {
  #answers;
  #told = element("p");
  #picture = svg("svg", { viewBox: `0 0 ${kWidth} ${kHeight}`, role: "img", class: "chart" });
  #table = element("table");
  #cache = element("p", { id: "cache-bytes" });

  /**
   * @param {HTMLElement} section
   * @param {import("./state.js").State} _state
   * @param {import("./answers.js").Answers} answers
   */
  constructor(section, _state, answers) {
    this.#answers = answers;
    section.append(this.#told, this.#cache, this.#picture, element("div", { className: "scroll" }, this.#table),
      element("p", { className: "note" },
        "One head, no mask, as many queries as keys: the model of FlashAttention (theorem 2 of the paper), as `tessera memory` prints it. " +
        "What is moved goes between memory and the fast memory that is named."));
  }

  draw() {
    const answer = this.#answers.bytes(kSeqlens);
    const last = answer.list[answer.list.length - 1];
    this.#told.textContent =
      `Fast memory: ${bytesText(answer.bytes)}, ${answer.memory}. At ${whole(last.seqlen)} tokens three steps move ` +
      `${(last.standard / last.tiled).toFixed(1)} times as many bytes as tiles do.`;
    this.#cache.textContent = cacheText(answer.cache);
    this.#drawChart(answer);
    this.#table.replaceChildren(
      element("caption", {}, "Bytes of one head"),
      element("thead", {}, element("tr", {}, ...["Tokens", "Three steps", "Tiles", "Ratio"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...answer.list.map((row) => element("tr", {},
        ...[whole(row.seqlen), bytesText(row.standard), bytesText(row.tiled), (row.standard / row.tiled).toFixed(1)].map((cell) => element("td", {}, cell))))));
  }

  /** @param {import("./engine.js").BytesAnswer} answer */
  #drawChart(answer) {
    const all = answer.list.flatMap((row) => [row.standard, row.tiled]).map(Math.log2);
    const [low, high] = [Math.floor(Math.min(...all)), Math.ceil(Math.max(...all))];
    const first = Math.log2(kSeqlens[0]), length = Math.log2(kSeqlens[kSeqlens.length - 1]) - first;
    const x = (/** @type {number} */ seqlen) => kLeft + ((Math.log2(seqlen) - first) / length) * (kWidth - kLeft - 90);
    const y = (/** @type {number} */ bytes) => kHeight - kBottom - ((Math.log2(bytes) - low) / (high - low)) * (kHeight - kBottom - 14);
    const parts = [];
    for (let power = Math.ceil(low / 5) * 5; power <= high; power += 5) {
      parts.push(svg("line", { x1: kLeft, x2: kWidth - 90, y1: y(2 ** power), y2: y(2 ** power), class: "grid" }));
      parts.push(svg("text", { x: kLeft - 6, y: y(2 ** power) + 4, class: "tick end" }, bytesText(2 ** power)));
    }
    for (const seqlen of kSeqlens.filter((_, i) => i % 2 === 0)) {
      parts.push(svg("text", { x: x(seqlen), y: kHeight - 12, class: "tick middle" }, whole(seqlen)));
    }
    for (const [name, label] of /** @type {const} */ ([["standard", "three steps"], ["tiled", "tiles"]])) {
      const points = answer.list.map((row) => `${x(row.seqlen).toFixed(1)},${y(row[name]).toFixed(1)}`);
      const last = answer.list[answer.list.length - 1];
      parts.push(svg("polyline", { points: points.join(" "), class: `line ${name}` }));
      parts.push(svg("text", { x: kWidth - 84, y: y(last[name]) + 4, class: `name ${name}` }, label));
    }
    this.#picture.replaceChildren(...parts);
    this.#picture.setAttribute("aria-label", `Bytes over tokens, both logarithmic: ${this.#told.textContent}`);
  }
}

/** @param {import("./engine.js").BytesAnswer["cache"]} cache */
function cacheText(cache) {
  if (!cache) return "The problem has no cache of keys and values.";
  const pages = cache.page_size
    ? ` They fill ${whole(cache.pages)} of ${whole(cache.num_pages)} pages of ${whole(cache.page_size)} slots each.`
    : "";
  return `Cache: sequences hold ${whole(cache.keys)} keys, ${bytesText(cache.used)} of the ${bytesText(cache.bytes)} that are set aside, for one layer. ` +
    `A step reads ${bytesText(cache.read)}.${pages}`;
}
