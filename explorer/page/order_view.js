// The order of work: who computes which piece when, by the planner's costs; idle time and the last round.
import { colours, counted, element, pointed, prepare, rangeText, whole } from "./elements.js";

const kDealing = {
  rounds: "Each multiprocessor knows its pieces: in every round one.",
  counter: "Whoever is free takes the next piece.",
  spans: "Each block of threads has an equal span of all keys; pieces are parts of sequences.",
};
const kSeconds = 8; // that a whole run takes when it is played

export class OrderView {
  #state;
  #answers;
  #facts = element("p");
  #canvas = element("canvas", { tabIndex: 0, role: "img" });
  #told = element("p", { className: "told", "aria-live": "polite" });
  #slider = element("input", { type: "range", min: "0", max: "1", step: "any", id: "time" });
  #play = element("button", { type: "button", id: "play" }, "Play");
  #playing = 0;

  /**
   * @param {HTMLElement} section
   * @param {import("./state.js").State} state
   * @param {import("./answers.js").Answers} answers
   */
  constructor(section, state, answers) {
    this.#state = state;
    this.#answers = answers;
    section.append(
      this.#facts,
      element("div", { className: "row" },
        this.#play,
        element("button", { type: "button", id: "step-back", onclick: () => this.#step(-1) }, "Step back"),
        element("button", { type: "button", id: "step", onclick: () => this.#step(1) }, "Step"),
        element("label", { className: "grow" }, "Time", this.#slider)),
      this.#canvas,
      this.#told,
      element("p", { className: "note" },
        "One line a worker, time to the right. Colours tell sequences and heads apart; where lines are high enough, the head of the Mask view has a frame. " +
        "Times are the planner's estimates: they tell pieces apart, and know no cache, no memory and no waits."),
    );
    this.#slider.addEventListener("input", () => this.#go(Number(this.#slider.value)));
    this.#play.addEventListener("click", () => this.#toggle());
    this.#canvas.addEventListener("click", (/** @type {PointerEvent} */ event) => this.#go(pointed(this.#canvas, event).x));
    this.#canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#tell(this.#at(event)));
    this.#canvas.addEventListener("pointerleave", () => this.#tell(undefined));
    this.#canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const steps = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (steps === undefined) return;
      event.preventDefault();
      this.#step(steps);
    });
  }

  draw() {
    const order = this.#answers.order();
    const share = (100 * order.busy) / Math.max(order.busy + order.idle, 1);
    this.#facts.textContent =
      `${order.kernel}: ${counted(order.pieces, "piece")} for ${counted(order.workers, order.worker)}` +
      (order.resident > 1 ? ` with ${order.resident} blocks of threads each` : "") +
      `. ${kDealing[order.dealing]} ${whole(order.end)} cycles, of which workers are busy ${share.toFixed(1)} %. ` +
      `The first has no more to do at ${whole(order.first_idle)}; ${counted(order.last_round, "piece")} end after that.` +
      (order.cut ? ` The first ${whole(order.items.length)} pieces are shown.` : "");
    this.#slider.value = this.#state.get("time");
    this.#drawPieces(order);
    this.#tell(undefined);
  }

  // ---- time ----

  #now() {
    return this.#state.number("time") * this.#answers.order().end;
  }

  /** @param {number} time  0 to 1 */
  #go(time) {
    this.#state.set({ time: String(Math.min(Math.max(time, 0), 1)) });
  }

  /** To the next or the last moment at which a piece begins. @param {number} direction */
  #step(direction) {
    const order = this.#answers.order();
    const now = this.#now();
    const moments = [...new Set([...order.items.map((item) => item.start), order.end])].sort((a, b) => a - b);
    const near = 1e-6 * order.end;
    const next = direction > 0 ? moments.find((at) => at > now + near) : moments.filter((at) => at < now - near).pop();
    this.#go((next ?? (direction > 0 ? order.end : 0)) / Math.max(order.end, 1));
  }

  #toggle() {
    this.#playing = this.#playing ? 0 : performance.now();
    this.#play.textContent = this.#playing ? "Pause" : "Play";
    if (!this.#playing) return;
    const from = this.#state.number("time") >= 1 ? 0 : this.#state.number("time");
    const begun = this.#playing;
    const frame = (/** @type {number} */ at) => {
      if (this.#playing !== begun) return;
      const time = from + Math.max(at - begun, 0) / 1000 / kSeconds;
      this.#go(time);
      if (time >= 1) this.#toggle();
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  // ---- picture ----

  /** @param {ReturnType<import("./answers.js").Answers["order"]>} order */
  #drawPieces(order) {
    const width = this.#canvas.clientWidth || 600;
    const line = Math.max(2.5, Math.min(22, 520 / order.workers));
    const height = line * order.workers;
    const context = prepare(this.#canvas, width, height);
    const colour = colours();
    context.fillStyle = colour.skipped;
    context.fillRect(0, 0, width, height);
    const now = this.#now();
    const ours = new Set(this.#answers.piecesOfHead());
    const heads = Math.max(...order.items.map((item) => item.head + 1), 1);
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    for (const item of order.items) {
      const x = (item.start / order.end) * width;
      const w = Math.max(((item.end - item.start) / order.end) * width, 0.6);
      const y = item.worker * line;
      const hue = (360 * (item.batch * heads + item.head) * 0.381966) % 360;
      context.globalAlpha = item.end <= now ? 1 : item.start <= now ? 0.8 : 0.3;
      context.fillStyle = item.start <= now && now < item.end ? colour.running : `hsl(${hue} 45% ${dark ? 55 : 50}%)`;
      context.fillRect(x, y, w, line - (line > 4 ? 1 : 0));
      context.globalAlpha = 1;
      if (ours.has(item) && w > 2 && line > 5) {
        context.strokeStyle = colour.ink;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, w - 1, Math.max(line - 2, 1));
      }
      if (w > 3) {
        context.fillStyle = colour.page;
        context.fillRect(x + w - 0.6, y, 0.6, line);
      }
    }
    context.fillStyle = colour.accent;
    context.fillRect((now / order.end) * width - 1, 0, 2, height);
    this.#canvas.setAttribute("aria-label",
      `${order.pieces} pieces on ${order.workers} workers. Left and right arrow keys go to the next begin of a piece.`);
  }

  /** @param {PointerEvent} event */
  #at(event) {
    const order = this.#answers.order();
    const at = pointed(this.#canvas, event);
    const [worker, time] = [Math.floor(at.y * order.workers), at.x * order.end];
    return order.items.find((item) => item.worker === worker && item.start <= time && time < item.end);
  }

  /** @param {import("./answers.js").Piece | undefined} item */
  #tell(item) {
    const order = this.#answers.order();
    if (item) {
      this.#told.textContent =
        `Piece ${whole(item.index)}: sequence ${item.batch}, head ${item.head}, rows ${rangeText(item.first_row, item.end_row)}, ` +
        `keys ${rangeText(item.first_key, item.end_key)}; ${order.worker} ${item.worker}, cycles ${whole(item.start)} to ${whole(item.end)}.`;
      return;
    }
    const now = this.#now();
    const done = order.items.filter((each) => each.end <= now).length;
    const running = order.items.filter((each) => each.start <= now && now < each.end).length;
    const busy = new Set(order.items.filter((each) => each.start <= now && now < each.end).map((each) => each.worker)).size;
    this.#told.textContent =
      `At cycle ${whole(now)}: ${counted(done, "piece")} done, ${whole(running)} under way, ${whole(order.workers - busy)} of ${counted(order.workers, order.worker)} idle.`;
  }
}
