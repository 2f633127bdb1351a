// The page: the question at the top, one view below it.
import { load } from "./engine.js";
import { Answers, textOf } from "./answers.js";
import { BytesView } from "./bytes_view.js";
import { Controls, kExamples } from "./controls.js";
import { KernelsView } from "./kernels_view.js";
import { MaskView } from "./mask_view.js";
import { OrderView } from "./order_view.js";
import { SoftmaxView } from "./softmax_view.js";
import { State } from "./state.js";
import { element } from "./elements.js";

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);

class Page {
  #state;
  #answers;
  #views;
  #controls;

  /** @param {import("./engine.js").Engine} engine */
  constructor(engine) {
    this.#state = new State(location);
    this.#answers = new Answers(engine, this.#state);
    const make = (/** @type {any} */ View, /** @type {string} */ id) => new View(byId(id), this.#state, this.#answers);
    this.#views = {
      mask: make(MaskView, "mask"), order: make(OrderView, "order"), softmax: make(SoftmaxView, "softmax"),
      bytes: make(BytesView, "bytes"), kernels: make(KernelsView, "kernels"),
    };
    this.#controls = new Controls(byId("controls").querySelector(".controls"), this.#state);
    this.#bindQuestion();
    this.#bindTabs();
    this.#state.listen((changed) => this.#follow(changed));
    addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.body.classList.toggle("embed", this.#state.get("embed") === "1");
    this.draw();
    document.body.dataset.ready = "yes";
  }

  draw() {
    const [problem, view] = [byId("problem"), this.#state.get("view")];
    if (problem !== document.activeElement || !problem.matches(":focus")) problem.value = this.#state.get("problem");
    byId("device").value = this.#state.get("device");
    byId("example").value = kExamples.find((each) => each[1] === this.#state.get("problem"))?.[1] ?? "";
    this.#controls.show(this.#state.get("problem"));
    document.body.dataset.view = view;
    for (const name of Object.keys(this.#views)) {
      const chosen = name === view;
      byId(name).hidden = !chosen;
      byId(`tab-${name}`).setAttribute("aria-selected", String(chosen));
      byId(`tab-${name}`).tabIndex = chosen ? 0 : -1;
    }
    const sentence = view === "softmax" ? "" : this.#answers.sentence() || this.#drawView(view);
    byId("sentence").textContent = sentence;
    byId(view).classList.toggle("stale", sentence !== "");
    if (view === "softmax") this.#views.softmax.draw();
  }

  /** Why the view has nothing to show; "": it shows it. @param {string} view */
  #drawView(view) {
    try {
      this.#views[view].draw();
      return "";
    } catch (error) {
      // Of a plan that fails the first line says why; the view of kernels has the rest.
      return textOf(error).split("\n")[0].replace(/:$/, ". See Kernels.");
    }
  }

  /** What was chosen of a problem means nothing in another one. @param {Set<string>} changed */
  #follow(changed) {
    if (changed.has("problem") && !changed.has("batch")) {
      const before = { batch: "0", head: "0", first: "0", row: "", key: "", time: "1" };
      this.#state.set(before);
    }
    if (changed.has("device") && !changed.has("row")) this.#state.set({ first: "0", row: "", key: "", time: "1" });
    this.draw();
  }

  #bindQuestion() {
    const [problem, device, example] = [byId("problem"), byId("device"), byId("example")];
    byId("question").addEventListener("submit", (/** @type {Event} */ event) => event.preventDefault());
    problem.value = this.#state.get("problem");
    problem.addEventListener("input", () => this.#state.set({ problem: problem.value }));
    device.append(...this.#answers.devices().map((each) =>
      element("option", { value: each.name }, `${each.name} (${each.arch}, ${each.workers} ${each.gpu ? "multiprocessors" : "cores"})`)));
    device.addEventListener("input", () => this.#state.set({ device: device.value }));
    example.append(element("option", { value: "" }, "own"), ...kExamples.map(([name, line]) => element("option", { value: line }, name)));
    example.addEventListener("input", () => {
      if (example.value === "") return;
      problem.value = example.value;
      this.#state.set({ problem: example.value });
    });
  }

  #bindTabs() {
    const names = Object.keys(this.#views);
    names.forEach((name, i) => {
      const tab = byId(`tab-${name}`);
      tab.addEventListener("click", () => this.#state.set({ view: name }));
      tab.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
        const steps = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (steps === undefined) return;
        event.preventDefault();
        const next = names[(i + steps + names.length) % names.length];
        this.#state.set({ view: next });
        byId(`tab-${next}`).focus();
      });
    });
  }
}

const embedded = document.getElementById("engine-bytes");
new Page(await load(embedded ? { base64: embedded.textContent.trim() } : "engine.wasm"));
