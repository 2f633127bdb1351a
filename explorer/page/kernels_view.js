// Every row of the catalog with its cost or its refusal, and the plan as `tessera plan` prints it.
import { bytesText, element, whole } from "./elements.js";

export class KernelsView {
  #answers;
  #told = element("p");
  #table = element("table");
  #text = element("pre", { tabIndex: 0 });

  /**
   * @param {HTMLElement} section
   * @param {import("./state.js").State} _state
   * @param {import("./answers.js").Answers} answers
   */
  constructor(section, _state, answers) {
    this.#answers = answers;
    section.append(this.#told, element("div", { className: "scroll" }, this.#table),
      element("details", {}, element("summary", {}, "As `tessera plan` prints it"), this.#text));
  }

  draw() {
    const plan = this.#answers.plan();
    this.#text.textContent = plan.text;
    const rows = plan.rows ?? [];
    const taken = rows.filter((row) => row.refusal === undefined);
    this.#told.textContent = plan.invalid ?? (plan.kernel === null
      ? `No kernel of the catalog takes this problem on ${plan.device}.`
      : `${plan.kernel} is chosen: the cheapest of ${taken.length} rows that take the problem. ${plan.work?.items} pieces of work, ` +
        `${bytesText(plan.workspace_bytes ?? 0)} of workspace.`);
    const cheapest = rows.find((row) => row.chosen)?.cost;
    const order = [...taken].sort((a, b) => Number(b.chosen) - Number(a.chosen) || (a.cost ?? 0) - (b.cost ?? 0));
    this.#table.replaceChildren(
      element("caption", {}, "The catalog: cost in cycles a query head, or why a row does not take it"),
      element("thead", {}, element("tr", {}, ...["Kernel", "Tile", "Cost", "Times the chosen"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {},
        ...order.map((row) => element("tr", { className: row.chosen ? "chosen" : "" },
          element("th", { scope: "row" }, row.name), element("td", {}, `${row.tile_m} x ${row.block_n}`),
          element("td", {}, whole(row.cost ?? 0)),
          element("td", {}, row.chosen ? "chosen" : cheapest ? ((row.cost ?? 0) / cheapest).toFixed(2) : ""))),
        ...rows.filter((row) => row.refusal !== undefined).map((row) => element("tr", { className: "refused" },
          element("th", { scope: "row" }, row.name), element("td", {}, `${row.tile_m} x ${row.block_n}`),
          element("td", { colSpan: 2 }, row.refusal)))));
  }
}
