// The softmax of one row, block by block as a kernel carries it, beside the three-step result.
import { counted, element, svg } from "./elements.js";
import { textOf } from "./answers.js";

const kWidth = 720, kHeight = 240, kMargin = 34;

export class SoftmaxView {
  #state;
  #answers;
  #inputs;
  #wrong = element("p", { role: "alert", className: "wrong" });
  #picture = svg("svg", { viewBox: `0 0 ${kWidth} ${kHeight}`, role: "img", class: "chart" });
  #told = element("p", { className: "told", "aria-live": "polite" });
  #table = element("table");
  #result = element("p", { id: "softmax-result" });

  /**
   * @param {HTMLElement} section
   * @param {import("./state.js").State} state
   * @param {import("./answers.js").Answers} answers
   */
  constructor(section, state, answers) {
    this.#state = state;
    this.#answers = answers;
    const field = (/** @type {"scores" | "values" | "block" | "slack"} */ name, /** @type {string} */ label, /** @type {object} */ more) => {
      const input = element("input", { id: `softmax-${name}`, oninput: () => state.set({ [name]: input.value }), ...more });
      return { name, input, label: element("label", { className: name === "scores" || name === "values" ? "wide" : "" }, label, input) };
    };
    this.#inputs = [
      field("scores", "Scores of the row (natural; -inf is hidden)", { spellcheck: false }),
      field("values", "Values, one a key (empty: ones)", { spellcheck: false }),
      field("block", "Keys a block", { type: "number", min: "1", step: "1" }),
      field("slack", "Slack, powers of 2", { type: "number", min: "0", step: "any", placeholder: "the GPU's" }),
    ];
    section.append(
      element("div", { className: "row" }, ...this.#inputs.map((input) => input.label)),
      element("div", { className: "row" },
        element("button", { type: "button", id: "random", onclick: () => this.#random() }, "Random row"),
        element("button", { type: "button", id: "block-back", onclick: () => this.#step(-1) }, "Block back"),
        element("button", { type: "button", id: "block-on", onclick: () => this.#step(1) }, "Next block")),
      this.#wrong, this.#picture, this.#told,
      element("div", { className: "scroll" }, this.#table),
      this.#result,
      element("p", { className: "note" },
        "Weights are powers of 2 of the score less a reference. The reference stays while scores exceed it by no more than the slack; " +
        "only then are the sum and the output so far multiplied by a factor. With a slack of 0 that is FlashAttention's online softmax."),
    );
  }

  draw() {
    for (const { name, input } of this.#inputs) if (input !== document.activeElement) input.value = this.#state.get(name);
    this.#wrong.textContent = "";
    let answer;
    try {
      const fields = { block: this.#state.number("block") || 1, ...this.#given("values"), ...this.#given("slack") };
      if (fields.slack !== undefined) fields.slack = fields.slack[0];
      answer = this.#answers.softmax(numbersOf(this.#state.get("scores")), fields);
    } catch (error) {
      this.#wrong.textContent = error instanceof RangeError ? error.message : textOf(error);
      return;
    }
    const seen = Math.min(this.#seen(), answer.blocks.length);
    this.#drawScores(answer, seen);
    this.#drawTable(answer, seen);
    this.#drawResult(answer, seen);
  }

  #seen() {
    return Math.max(this.#state.number("step"), 0);
  }

  /** @param {"values" | "slack"} name */
  #given(name) {
    const text = this.#state.get(name).trim();
    return text === "" ? {} : { [name]: numbersOf(text) };
  }

  /** @param {number} direction */
  #step(direction) {
    const count = Math.ceil(numbersOf(this.#state.get("scores")).length / (this.#state.number("block") || 1));
    this.#state.set({ step: String(Math.min(Math.max(Math.min(this.#seen(), count) + direction, 0), count)) });
  }

  #random() {
    const count = 16 + Math.floor(Math.random() * 17);
    const normal = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
    this.#state.set({
      scores: Array.from({ length: count }, () => (3 * normal()).toFixed(2)).join(" "),
      values: Array.from({ length: count }, () => normal().toFixed(2)).join(" "), step: "0",
    });
  }

  /** @param {import("./engine.js").SoftmaxAnswer} answer @param {number} seen */
  #drawScores(answer, seen) {
    const scores = answer.base2_scores;
    const known = [...scores, ...answer.blocks.map((block) => block.reference)].filter((x) => x !== null);
    const low = Math.min(0, ...known), high = Math.max(1, ...known);
    const y = (/** @type {number} */ value) => kHeight - 20 - ((value - low) / (high - low)) * (kHeight - 40);
    const step = (kWidth - kMargin - 6) / Math.max(scores.length, 1);
    const x = (/** @type {number} */ i) => kMargin + i * step;
    const parts = [svg("title", {}, "Base-2 scores, and the reference while each block is taken")];
    for (const value of ticks(low, high)) {
      parts.push(svg("line", { x1: kMargin, x2: kWidth - 4, y1: y(value), y2: y(value), class: "grid" }));
      parts.push(svg("text", { x: kMargin - 5, y: y(value) + 4, class: "tick end" }, String(value)));
    }
    scores.forEach((score, i) => {
      const at = answer.blocks.findIndex((block) => block.begin <= i && i < block.end);
      const kind = at < seen ? "bar" : "bar later";
      if (score === null) parts.push(svg("text", { x: x(i) + step / 2, y: kHeight - 6, class: "tick middle" }, "-∞"));
      else parts.push(svg("rect", { x: x(i) + 1, width: Math.max(step - 2, 1), y: Math.min(y(score), y(0)), height: Math.max(Math.abs(y(score) - y(0)), 1), class: kind }));
    });
    answer.blocks.forEach((block, i) => {
      parts.push(svg("line", { x1: x(block.begin), x2: x(block.begin), y1: 8, y2: kHeight - 16, class: "border" }));
      if (i >= seen || block.reference === null) return;
      const at = y(block.reference);
      parts.push(svg("line", { x1: x(block.begin), x2: x(block.end), y1: at, y2: at, class: block.rescaled ? "reference moved" : "reference" }));
    });
    this.#picture.replaceChildren(...parts);
  }

  /** @param {import("./engine.js").SoftmaxAnswer} answer @param {number} seen */
  #drawTable(answer, seen) {
    const head = ["Keys", "Greatest", "Reference", "Factor", "Weights", "Sum", "Output"];
    const rows = answer.blocks.slice(0, seen).map((block) => element("tr", { className: block.rescaled ? "moved" : "" },
      ...[
        `${block.begin} to ${block.end - 1}`, text(block.greatest), text(block.reference),
        block.rescaled ? `${text(block.factor)}: rescales` : block.raised ? "first reference" : "1: stays",
        block.weights.map(text).join("  "), text(block.sum), text(block.output),
      ].map((cell) => element("td", {}, cell))));
    this.#table.replaceChildren(
      element("caption", {}, "The row as the kernel carries it"),
      element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, ...rows));
  }

  /** @param {import("./engine.js").SoftmaxAnswer} answer @param {number} seen */
  #drawResult(answer, seen) {
    const moved = answer.blocks.slice(0, seen).filter((block) => block.rescaled).length;
    this.#told.textContent = `${seen} of ${counted(answer.blocks.length, "block")} taken; the output was rescaled ${counted(moved, "time")}.`;
    this.#picture.setAttribute("aria-label", this.#told.textContent);
    const three = answer.three_steps;
    this.#result.textContent = seen < answer.blocks.length
      ? `Three steps give ${text(three.output)}; the online row is not at its end.`
      : `Online: output ${text(answer.online.output)}, lse ${text(answer.online.lse)}. ` +
        `Three steps: output ${text(three.output)}, lse ${text(three.lse)}. ` +
        `They differ by ${Math.abs(answer.online.output - three.output).toExponential(1)}.`;
  }
}

/** @param {number | null} x */
function text(x) {
  if (x === null) return "-∞";
  if (x !== 0 && (Math.abs(x) < 1e-3 || Math.abs(x) >= 1e5)) return x.toExponential(2);
  return String(Number(x.toPrecision(5)));
}

/**
 * Numbers between spaces or commas. Errors: RangeError, which names the word.
 * @param {string} line
 */
export function numbersOf(line) {
  return line.trim().split(/[\s,;]+/).filter((word) => word !== "").map((word) => {
    const value = word === "-inf" ? -Infinity : Number(word);
    if (Number.isNaN(value)) throw new RangeError(`"${word}" is no number; numbers stand between spaces, such as 1.5 -0.3 -inf`);
    return value;
  });
}

/** @param {number} low @param {number} high */
function ticks(low, high) {
  const size = [1, 2, 5, 10, 20, 50, 100, 1000].find((each) => (high - low) / each <= 7) ?? high - low;
  const list = [];
  for (let at = Math.ceil(low / size) * size; at <= high; at += size) list.push(at);
  return list;
}
