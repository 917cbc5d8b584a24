// The page of the gateway: one state a second by server-sent events, drawn anew each time. No framework, no build.
// `/?still` takes one look and stops.

const PHASES = ["pause", "flush", "verify", "load", "label", "resume"];
const CLASSES = ["pure", "recomputed", "mixed", "carried", "not_auditable", "unproven"];
const el = (id) => document.getElementById(id);
const still = new URLSearchParams(location.search).has("still");

// Everything that comes from outside is set as text, never as HTML.
function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const child of children) node.append(child);
  return node;
}

function bar(parts, className = "bar") {
  const node = make("div", className);
  for (const [share, colour, title] of parts) {
    const piece = make("i");
    piece.style.width = `${100 * share}%`;
    piece.style.background = `var(--${colour})`;
    if (title) piece.title = title;
    node.append(piece);
  }
  return node;
}

const count = (n) => (n ?? 0).toLocaleString("en");
const percent = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(1)} %`);
const ms = (x) => (x === null || x === undefined ? "–" : x >= 1000 ? `${(x / 1000).toFixed(2)} s` : `${x.toFixed(0)} ms`);

function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function line(name, value) {
  return make("div", "line", make("span", "muted", name), make("b", "", value));
}

function card(name, value) {
  return make("div", "card", make("b", "", value), make("span", "", name));
}

function engine(e) {
  const word = e.paused ? "paused" : e.status;
  const colour = { confirmed: "good", joining: "warning", retired: "bad", paused: "warning" }[word];
  const node = make("div", `engine ${e.status}`);
  node.append(make("div", "row", make("b", "", e.name), make("span", `pill ${colour}`, word)));
  node.append(make("div", "row muted", make("span", "", e.version ?? "no version"), make("span", "", e.url)));
  const used = e.kv_capacity ? 1 - e.kv_free / e.kv_capacity : 0;
  node.append(bar([[used, "accent", "KV in use"]], "meter"));
  const free = e.kv_capacity ? `${count(e.kv_free)} of ${count(e.kv_capacity)}` : "–";
  node.append(make("div", "row muted", make("span", "", "free KV"), make("span", "", free)));
  node.append(make("div", "row muted", make("span", "", "prefix hit rate"), make("span", "", percent(e.hit_rate))));
  node.append(make("div", "row muted", make("span", "", "in flight"), make("span", "", count(e.in_flight))));
  if (e.status === "retired") node.append(make("p", "reason", e.reason));
  return node;
}

function publication(p, now, longest) {
  const bad = p.engines.filter((e) => !e.confirmed).length;
  const word = p.state === "failed" ? "failed" : bad ? `${bad} retired` : "all confirmed";
  const node = make("div", "publication");
  const title = make("span", "", make("b", "", `${p.previous_version} → ${p.version}`), ` ${ago(now - p.started_at)} ago`);
  node.append(make("div", "line", title, make("span", `pill ${p.state === "failed" ? "bad" : bad ? "warning" : "good"}`, word)));
  for (const e of p.engines) {
    const parts = PHASES.map((name) => [(e[`${name}_ms`] ?? 0) / longest, name, `${name} ${ms(e[`${name}_ms`])}`]);
    const told = e.confirmed ? ms(e.paused_ms) : e.failed_step;
    const track = make("div", "track", make("span", "", e.engine), bar(parts), make("span", "", told));
    if (!e.confirmed) track.title = e.reason;
    node.append(track);
  }
  return node;
}

function classes(found) {
  const total = Object.values(found).reduce((a, b) => a + b, 0);
  const known = CLASSES.filter((name) => found[name]);
  const node = make("div", "", bar(known.map((name) => [found[name] / total, name, name]), "bar big"));
  for (const name of CLASSES) {
    const swatch = make("i");
    swatch.style.background = `var(--${name})`;
    const label = make("span", "legend", swatch, name);
    const share = total ? ` · ${percent((found[name] ?? 0) / total)}` : "";
    node.append(make("div", "line", label, make("b", "", count(found[name]) + share)));
  }
  return node;
}

function draw(state) {
  const { gate, store, recent } = state;
  const confirmed = state.engines.filter((e) => e.status === "confirmed").length;
  el("policy").textContent = `${state.model} · ${state.policy}`;
  document.body.classList.toggle("no-engine", confirmed === 0);
  el("no-engine").hidden = confirmed > 0;
  el("figures").replaceChildren(
    card("weight version", state.version),
    card("engines confirmed", `${confirmed} / ${state.engines.length}`),
    card("requests inside", count(gate.inside)),
    card("requests a second", recent.requests_per_s.toFixed(1)),
    card("tokens a second", count(Math.round(recent.tokens_per_s))),
    card("p50 / p90 / p99", [50, 90, 99].map((q) => ms(recent[`p${q}_ms`])).join(" / ")),
    card("failed", percent(recent.error_rate)),
    card("turns stored", count(Object.values(store.states).reduce((a, b) => a + b, 0))),
    card("sessions", count(store.sessions)),
    card("samples trained", count(store.trained + store.removed.trained)),
    card("up for", ago(state.now - state.started_at)),
  );
  el("engines").replaceChildren(...state.engines.map(engine));
  const shown = [...state.publications].reverse().slice(0, 6);
  const sums = shown.flatMap((p) => p.engines.map((e) => PHASES.reduce((a, name) => a + (e[`${name}_ms`] ?? 0), 0)));
  const longest = Math.max(1, ...sums);
  el("publications").replaceChildren(
    ...(shown.length ? shown.map((p) => publication(p, state.now, longest)) : [make("p", "muted", "none yet")]),
  );
  el("classes").replaceChildren(classes(store.classes));
  el("queue").replaceChildren(
    line("gate", gate.closed ? "closed: a publication" : "open"),
    line("waiting at the gate", count(gate.waiting)),
    line("told to come again", count(gate.refused)),
    line("trajectories", count(store.trajectories)),
    line("scored, not trained", count(store.scored - store.trained)),
    line("under a lease that holds", count(store.leased)),
    line("under one that ran out", count(store.expired)),
    line("turns in the store", `${(store.bytes / 2 ** 20).toFixed(1)} MiB`),
    line("sessions removed from it", count(store.removed.sessions)),
    line("clients that left", count(store.states.disconnected)),
    line("requests that failed", count(store.states.failed)),
    line("given up: an engine ended during them", count(state.quarantine.count)),
    line("of these, refused when they came again", count(state.quarantine.refused)),
  );
}

// A version's colour: its place among those that the session was sampled by.
const SHADES = ["accent", "load", "resume", "carried", "not_auditable", "flush", "mixed", "label"];

function turn(t, shades, longest) {
  const tokens = Math.max(1, t.output_tokens);
  const parts = t.spans.map((s) => {
    const share = (s.end - s.start) / tokens * (t.output_tokens / longest);
    return [share, shades.get(s.version), `${s.version}: tokens ${s.start}..${s.end}`];
  });
  const bad = { failed: "bad", disconnected: "warning", spliced: "warning" }[t.state];
  const word = make("span", `pill ${bad ?? "good"}`, bad ? t.state : t.class);
  const size = `${count(t.prompt_tokens)} + ${count(t.output_tokens)} tokens`;
  const named = make("span", "muted", `${t.receipt} · ${t.engine || "no engine"} · ${size} · ${ms(1000 * (t.finished_at - t.submitted_at))}`);
  return make("div", "turn", make("div", "line", named, word), bar(parts));
}

function session(found) {
  const versions = [...new Set(found.turns.flatMap((t) => t.spans.map((s) => s.version)))];
  const shades = new Map(versions.map((v, i) => [v, SHADES[i % SHADES.length]]));
  const longest = Math.max(1, ...found.turns.map((t) => t.output_tokens));
  const branches = [...found.branches, { trajectory: -1 }];
  const nodes = branches.flatMap((b) => {
    const turns = found.turns.filter((t) => t.trajectory === b.trajectory);
    if (b.trajectory < 0 && !turns.length) return [];
    const score = b.score === null ? "no score" : `score ${b.score}`;
    const marks = [b.group && `group ${b.group}`, score, b.place, b.trains && "trains", b.marked && "not to be trained on"];
    const title = b.trajectory < 0 ? "in no branch: the client never had the answer" : `branch ${b.trajectory} · ${marks.filter(Boolean).join(" · ")}`;
    return [make("h3", "", title), ...turns.map((t) => turn(t, shades, longest))];
  });
  const legend = make("p", "legend");
  for (const [version, colour] of shades) {
    const swatch = make("i");
    swatch.style.background = `var(--${colour})`;
    legend.append(swatch, version);
  }
  const left = found.turns_stored - found.turns.length;
  const head = `${found.session}: ${count(found.turns_stored)} turns, ${count(found.branches_stored)} branches`;
  return make("div", "", make("p", "muted", left ? `${head}; the first ${count(left)} aren't shown` : head), legend, ...nodes);
}

async function showSession(name) {
  try {
    el("session").replaceChildren(session(await (await ask(`/reef/sessions?name=${encodeURIComponent(name)}`)).json()));
  } catch (error) {
    const why = error.message === "HTTP 404" ? "there is no such session or receipt" : error.message;
    el("session").replaceChildren(make("p", "reason", why));
  }
}

function live(text, colour) {
  el("live").textContent = text;
  el("live").className = `pill ${colour}`;
}

function headers() {
  const token = sessionStorage.getItem("reef-admin-token");
  return token ? { authorization: `Bearer ${token}` } : {};
}

// Resolves with the next token that somebody enters: a wrong one isn't tried again.
function signIn(wrong) {
  el("sign-in").hidden = false;
  el("wrong").hidden = !wrong;
  live(wrong ? "wrong token" : "admin token needed", "bad");
  return new Promise((entered) => {
    el("sign-in").addEventListener("submit", () => entered(), { once: true });
  });
}

async function ask(path) {
  const sent = headers();
  const answer = await fetch(path, { headers: sent });
  if (answer.status === 401 || answer.status === 403) {
    await signIn("authorization" in sent);
    return ask(path);
  }
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  el("sign-in").hidden = true;
  return answer;
}

// Not EventSource: it can't send a token.
async function follow() {
  const reader = (await ask("/reef/events")).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the gateway closed the stream");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    const data = events.at(-1)?.split("\n").find((text) => text.startsWith("data: "));
    if (data) {
      draw(JSON.parse(data.slice(6)));
      live(...(document.body.classList.contains("no-engine") ? ["no engine", "bad"] : ["live", "good"]));
    }
  }
}

async function run() {
  for (;;) {
    try {
      if (still) {
        draw(await (await ask("/reef/state")).json());
        return live("one look", document.body.classList.contains("no-engine") ? "bad" : "good");
      }
      await follow();
    } catch (error) {
      live(error.message, "bad");
      await new Promise((wake) => setTimeout(wake, 2000));
    }
  }
}

el("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("reef-admin-token", el("token").value.trim());
  el("wrong").hidden = true;
});
el("find-session").addEventListener("submit", (event) => {
  event.preventDefault();
  showSession(el("session-name").value.trim());
});
el("phases").append(
  ...PHASES.flatMap((name) => {
    const swatch = make("i");
    swatch.style.background = `var(--${name})`;
    return [swatch, name];
  }),
);
run();
