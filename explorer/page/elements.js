// Small means of the views: elements, pictures of as many pixels as the screen has, numbers as text.

/**
 * An HTML element.
 * @param {string} name
 * @param {Record<string, unknown>} [properties]  of the element; "aria-..." and the like are attributes
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  assign(made, properties);
  made.append(...children);
  return made;
}

/**
 * An SVG element.
 * @param {string} name
 * @param {Record<string, string | number>} [attributes]
 * @param {...(Node | string)} children
 * @returns {SVGElement}
 */
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/**
 * @param {HTMLElement} made
 * @param {Record<string, unknown>} properties
 */
function assign(made, properties) {
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role" || key === "for") made.setAttribute(key, String(value));
    else made[key] = value;
  }
}

/** The colours of the page's style sheet, which has one set for light and one for dark. */
export function colours() {
  const style = getComputedStyle(document.documentElement);
  /** @param {string} name */
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    page: of("page"), ink: of("ink"), faint: of("faint"), line: of("line"), skipped: of("skipped"),
    masked: of("masked"), full: of("full"), running: of("running"), accent: of("accent"),
  };
}

/**
 * Makes a canvas so many CSS pixels large, and sharp; returns its context in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function prepare(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  canvas.style.height = `${height}px`;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/**
 * Where the pointer is, from 0 to 1 in both directions.
 * @param {HTMLElement} of
 * @param {PointerEvent} event
 */
export function pointed(of, event) {
  const box = of.getBoundingClientRect();
  /** @param {number} x */
  const within = (x) => Math.min(Math.max(x, 0), 1 - 1e-9);
  return { x: within((event.clientX - box.left) / box.width), y: within((event.clientY - box.top) / box.height) };
}

const kNumbers = new Intl.NumberFormat("en");
/** @param {number} x */
export const whole = (x) => kNumbers.format(Math.round(x));

/** @param {number} bytes */
export function bytesText(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const at = Math.min(units.length - 1, bytes < 1 ? 0 : Math.floor(Math.log2(bytes) / 10));
  const value = bytes / 2 ** (10 * at);
  return `${at === 0 || value >= 100 ? whole(value) : value.toFixed(1)} ${units[at]}`;
}

/**
 * "7", or "7 to 9" of a range that ends before 10.
 * @param {number} begin
 * @param {number} end
 */
export const rangeText = (begin, end) => (end - begin <= 1 ? whole(begin) : `${whole(begin)} to ${whole(end - 1)}`);

/**
 * "1 piece", "2 pieces".
 * @param {number} count
 * @param {string} noun
 */
export const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
