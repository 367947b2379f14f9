// Text of numbers, as `sojourn top` writes them (cli/top_view.py); a test compares the two.

export function duration(seconds) {
  seconds = Math.max(0, seconds);
  if (seconds < 0.095) return `${(seconds * 1000).toFixed(0)}ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)}s`;
  const whole = Math.round(seconds);
  if (whole < 100) return `${whole}s`;
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 6000) return `${Math.floor(whole / 60)}m${two(whole % 60)}`;
  if (whole < 360000) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}`;
  return `${Math.floor(whole / 86400)}d`;
}

export const count = (number) => scaled(number, 1000, "kMGT");
export const size = (bytes) => scaled(bytes, 1024, "KMGT");

function scaled(number, step, suffixes) {
  if (number < step) return number.toFixed(0);
  for (const suffix of suffixes) {
    number /= step;
    if (number < 999.5) return `${number.toFixed(number < 99.95 ? 1 : 0)}${suffix}`;
  }
  return `${number.toFixed(0)}${suffixes.at(-1)}`;
}

export function percent(part, whole) {
  if (!whole) return "0%";
  return part > 0 && part < 0.005 * whole ? "<1%" : `${Math.round((100 * part) / whole)}%`;
}

// A program's label: its name and the end of its id, which distinguishes programs of one name.
export function programLabel({ program_id: id, name }) {
  if (!name || name === id) return id;
  const letters = [...name];
  const short = letters.length > 22 ? `${letters.slice(0, 21).join("")}…` : name;
  return `${short} ${id.length > 12 ? `…${id.slice(-6)}` : id}`;
}

// An element with properties and children. Strings become text nodes, never markup.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
