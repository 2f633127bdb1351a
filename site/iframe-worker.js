// The search runs in a worker. Of a page that is opened from a folder browsers start none; there a hidden frame, which
// runs the worker's script beside the page, takes its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    /** @param {string | URL} url */
    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.#loaded = new Promise((done) => script.addEventListener("load", done));
      script.src = String(url);
      inside.document.body.append(script);
    }

    /** @param {unknown} data */
    async postMessage(data) {
      await this.#loaded;
      this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
