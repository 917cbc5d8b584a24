// The page's script without a browser: as much of a DOM as it uses, and a gateway that answers as it is given on stdin.
// {"script": PATH, "state": what /reef/state answers, "token": the one that it wants, "entered": tokens, one by one}
// Prints what somebody would see after each, and how often the gateway was asked by then.
import { readFileSync } from "node:fs";

const given = JSON.parse(readFileSync(0, "utf8"));
const nodes = new Map();
let asked = 0;

class Node {
  constructor(tag) {
    Object.assign(this, { tag, children: [], style: {}, hidden: false, className: "", value: "", listeners: [] });
    const names = new Set();
    this.classList = {
      toggle: (name, on) => (on ? names.add(name) : names.delete(name)),
      contains: (name) => names.has(name),
    };
  }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  set textContent(text) { this.children = [text]; }
  get text() { return this.children.map((c) => (c instanceof Node ? c.text : c)).join(" "); }
  addEventListener(name, call, options = {}) { this.listeners.push({ name, call, once: options.once }); }
  dispatch(name) {
    for (const found of this.listeners.filter((l) => l.name === name)) {
      if (found.once) this.listeners.splice(this.listeners.indexOf(found), 1);
      found.call({ preventDefault() {}, target: this });
    }
  }
}

const stored = new Map();
globalThis.document = {
  body: new Node("body"),
  createElement: (tag) => new Node(tag),
  getElementById: (id) => nodes.get(id) ?? nodes.set(id, new Node(id)).get(id),
};
globalThis.location = { search: "?still" };
globalThis.sessionStorage = { getItem: (k) => stored.get(k) ?? null, setItem: (k, v) => stored.set(k, v) };
globalThis.fetch = async (path, { headers }) => {
  asked += 1;
  const allowed = !given.token || headers.authorization === `Bearer ${given.token}`;
  const answer = path.startsWith("/reef/state") ? given.state : given.answers?.[path];
  return { ok: allowed && answer !== undefined, status: allowed ? (answer === undefined ? 404 : 200) : 401, json: async () => answer };
};

const el = (id) => document.getElementById(id);
for (const id of ["sign-in", "wrong", "no-engine"]) el(id).hidden = true;
const settle = () => new Promise((wake) => setTimeout(wake, 50));
function look() {
  const hidden = Object.fromEntries(["sign-in", "wrong", "no-engine"].map((id) => [id, el(id).hidden]));
  const shown = Object.fromEntries(["figures", "engines", "queue", "classes", "session"].map((id) => [id, el(id).text]));
  return { asked, hidden, shown, live: [el("live").text, el("live").className] };
}

await import(given.script);
await settle();
const seen = [look()];
for (const token of given.entered ?? []) {
  el("token").value = token;
  el("sign-in").dispatch("submit");
  await settle();
  seen.push(look());
}
for (const session of given.sessions ?? []) {
  el("session-name").value = session;
  el("find-session").dispatch("submit");
  await settle();
  seen.push(look());
}
console.log(JSON.stringify(seen));
process.exit(0);
