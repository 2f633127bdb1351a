// Bytes that attention moves into each fast memory, tiled and in three steps, over the length of a sequence.
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
        "Each line takes its fast memory for the only one, and all of it for this head."));
  }

  draw() {
    const answer = this.#answers.bytes(kSeqlens);
    const levels = answer.levels.filter((level) => level.refusal === undefined);
    this.#cache.textContent = cacheText(answer.cache);
    this.#told.textContent = answer.levels.map(levelText).join(" ");
    this.#drawChart(levels);
    const [first] = levels;
    const head = ["Tokens", "Three steps", ...levels.map((level) => `Tiles: ${level.source} into ${level.name}`)];
    this.#table.replaceChildren(
      element("caption", {}, "Bytes of one head"),
      element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...(first?.list ?? []).map((row, i) => element("tr", {},
        ...[whole(row.seqlen), bytesText(row.standard), ...levels.map((level) => tiledText(level.list[i]))].map((cell) => element("td", {}, cell))))));
  }

  /** @param {import("./engine.js").BytesAnswer["levels"]} levels */
  #drawChart(levels) {
    const lines = [
      { name: "standard", label: "three steps", bytes: (levels[0]?.list ?? []).map((row) => row.standard) },
      ...levels.map((level, i) => ({ name: `level-${i}`, label: `into ${level.name}`, bytes: level.list.map((row) => row.tiled) })),
    ];
    const all = lines.flatMap((line) => line.bytes).map(Math.log2);
    const [low, high] = all.length > 0 ? [Math.floor(Math.min(...all)), Math.ceil(Math.max(...all))] : [0, 1];
    const first = Math.log2(kSeqlens[0]), length = Math.log2(kSeqlens[kSeqlens.length - 1]) - first;
    const x = (/** @type {number} */ seqlen) => kLeft + ((Math.log2(seqlen) - first) / length) * (kWidth - kLeft - 40);
    const y = (/** @type {number} */ bytes) => kHeight - kBottom - ((Math.log2(bytes) - low) / (high - low)) * (kHeight - kBottom - 14);
    const parts = [];
    for (let power = Math.ceil(low / 5) * 5; power <= high; power += 5) {
      parts.push(svg("line", { x1: kLeft, x2: kWidth - 40, y1: y(2 ** power), y2: y(2 ** power), class: "grid" }));
      parts.push(svg("text", { x: kLeft - 6, y: y(2 ** power) + 4, class: "tick end" }, bytesText(2 ** power)));
    }
    for (const seqlen of kSeqlens.filter((_, i) => i % 2 === 0)) {
      parts.push(svg("text", { x: x(seqlen), y: kHeight - 12, class: "tick middle" }, whole(seqlen)));
    }
    lines.forEach(({ name, label, bytes }, i) => {
      const points = bytes.map((value, at) => `${x(kSeqlens[at]).toFixed(1)},${y(value).toFixed(1)}`);
      parts.push(svg("polyline", { points: points.join(" "), class: `line ${name}` }));
      parts.push(svg("text", { x: kLeft + 12, y: 26 + 18 * i, class: `name ${name}` }, label));
    });
    this.#picture.replaceChildren(...parts);
    this.#picture.setAttribute("aria-label", `Bytes over tokens, both logarithmic. ${this.#told.textContent}`);
  }
}

/** @param {{tiled: number, standard: number}} row */
const tiledText = (row) => `${bytesText(row.tiled)} (${(row.standard / row.tiled).toFixed(1)} times less)`;

/** @param {import("./engine.js").BytesAnswer["levels"][0]} level */
function levelText(level) {
  const name = `${level.name[0].toUpperCase()}${level.name.slice(1)}, ${bytesText(level.bytes)}`;
  if (level.refusal !== undefined) return `${name}: ${level.refusal}.`;
  const last = level.list[level.list.length - 1];
  return `${name}: at ${whole(last.seqlen)} tokens three steps move ${(last.standard / last.tiled).toFixed(1)} times as many bytes into it as tiles do.`;
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
