// What the page shows, all of it in the URL's fragment, so that a link or a reload shows the same.

/** @typedef {typeof kDefaults} Fields  texts, as they stand in the URL */

export const kDefaults = {
  problem: "fwd bf16 b=2 h=8/2 q=2048 k=2048 d=128 causal",
  device: "h200",
  view: "mask",
  batch: "0", // sequence whose mask is shown
  head: "0", // its query head
  first: "0", // its first piece, where not all fit into an answer
  row: "", // of the tile that is looked at: its first row and key
  key: "",
  time: "1", // of the order of work, from 0 to 1
  scores: "1.2 0.3 -0.5 2.0 0.1 3.1 2.9 -1.0 0.4 9.5 2.2 1.7 8.8 0.0 -2.0 11.3",
  values: "",
  block: "4", // keys of a step of the softmax
  slack: "", // empty: what the device's kernels have
  step: "99", // blocks that the softmax has seen
  embed: "", // "1": inside a text, the view alone
};

/** The fields, and who wants to know when they change. */
export class State {
  /** @type {Fields} */
  #fields = { ...kDefaults };
  /** @type {((changed: Set<string>) => void)[]} */
  #listeners = [];

  /** @param {Location} location  that the fields come from and go to */
  constructor(location) {
    this.#read(location.hash);
    addEventListener("hashchange", () => {
      const before = this.#fields;
      this.#read(location.hash);
      this.#tell(Object.keys(kDefaults).filter((name) => before[name] !== this.#fields[name]));
    });
  }

  /** @param {keyof Fields} name */
  get(name) {
    return this.#fields[name];
  }

  /** @param {keyof Fields} name */
  number(name) {
    return Number(this.#fields[name]) || 0;
  }

  /** @param {Partial<Fields>} changes */
  set(changes) {
    const changed = Object.keys(changes).filter((name) => this.#fields[name] !== changes[name]);
    if (changed.length === 0) return;
    this.#fields = { ...this.#fields, ...changes };
    history.replaceState(null, "", `#${this.text()}`);
    this.#tell(changed);
  }

  /** The fragment; what has its default is left out. */
  text() {
    const words = Object.entries(this.#fields).filter(([name, value]) => value !== kDefaults[name]);
    return new URLSearchParams(words).toString();
  }

  /** @param {(changed: Set<string>) => void} listener */
  listen(listener) {
    this.#listeners.push(listener);
  }

  /** @param {string} hash */
  #read(hash) {
    const given = new URLSearchParams(hash.slice(1));
    this.#fields = { ...kDefaults };
    for (const name of Object.keys(kDefaults)) this.#fields[name] = given.get(name) ?? kDefaults[name];
  }

  /** @param {string[]} changed */
  #tell(changed) {
    if (changed.length > 0) for (const listener of this.#listeners) listener(new Set(changed));
  }
}
