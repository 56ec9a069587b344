"use strict";
// The playground: sends a request of the form to the server's own chat endpoint, and shows its stream.
(() => {
  const get = (id) => document.getElementById(id);
  const examples = JSON.parse(get("examples").textContent);
  const names = { schema: "JSON schema", regex: "Regular expression" };
  const sources = { schema: "", regex: "" };
  let kind = "schema";
  let pictures = []; // each with its name and its data URL
  let running = null; // the AbortController of what runs

  // JSON with what is short on one line.
  const layOut = (value, pad = "", before = 0) => {
    const flat = JSON.stringify(value, null, 1).replace(/\n\s*/g, " ");
    if (typeof value !== "object" || before + flat.length <= 44) return flat;
    const inner = `${pad}  `;
    const items = Array.isArray(value)
      ? value.map((item) => inner + layOut(item, inner))
      : Object.entries(value).map(([name, item]) => {
        const head = `${inner}"${name}": `;
        return head + layOut(item, inner, head.length);
      });
    const [open, close] = Array.isArray(value) ? "[]" : "{}";
    return `${open}\n${items.join(",\n")}\n${pad}${close}`;
  };
  const showKind = (next) => {
    if (kind in sources) sources[kind] = get("source").value;
    kind = get("kind").value = next;
    get("source-field").hidden = kind === "free";
    if (kind === "free") return;
    get("source").value = sources[kind];
    get("source").rows = kind === "schema" ? 14 : 3;
    get("source-field").querySelector("label").textContent = names[kind];
    refuse("");
  };
  const showPictures = () => get("pictures")?.replaceChildren(...pictures.map((one, at) => {
    const image = Object.assign(document.createElement("img"), { src: one.url, alt: one.name });
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: "Remove" });
    button.setAttribute("aria-label", `Remove ${one.name}`);
    button.addEventListener("click", () => {
      pictures.splice(at, 1);
      showPictures();
      (get("pictures").querySelector("button") ?? get("picture")).focus();
    });
    const item = document.createElement("li");
    item.append(image, button);
    return item;
  }));
  const readPicture = (file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve({ name: file.name, url: reader.result }));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
  // Takes the pictures among files that were chosen, dropped or pasted.
  const addPictures = async (files) => {
    const found = [...files].filter((file) => file.type.startsWith("image/"));
    try {
      pictures.push(...await Promise.all(found.map(readPicture)));
    } catch (error) {
      get("error").textContent = error.message;
    }
    showPictures();
  };
  const showExample = (example) => {
    pictures = [];
    showPictures();
    showKind("free"); // keeps nothing of what stood there
    sources.schema = example.schema ? layOut(example.schema) : "";
    sources.regex = example.regex ?? "";
    get("prompt").value = example.prompt;
    showKind(example.schema ? "schema" : "regex");
  };
  const refuse = (reason) => {
    get("source-error").textContent = reason;
    get("source").setAttribute("aria-invalid", String(Boolean(reason)));
    if (reason) get("source").focus();
  };

  // What the form asks for; null where its grammar cannot be read.
  const readForm = () => {
    const text = get("prompt").value;
    const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    const content = parts.length ? [...parts, { type: "text", text }] : text;
    const body = {
      messages: [{ role: "user", content }],
      temperature: get("temperature").valueAsNumber,
      max_tokens: get("max-tokens").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
      trace: "html",
    };
    if (get("seed").value) body.seed = get("seed").valueAsNumber;
    const source = get("source").value;
    refuse("");
    if (kind !== "free" && !source.trim()) {
      refuse(`Enter a ${names[kind].toLowerCase().replace("json", "JSON")}, or choose free text.`);
      return null;
    }
    if (kind === "regex") body.structured_outputs = { regex: source };
    if (kind === "schema") {
      try {
        const schema = JSON.parse(source);
        body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
      } catch (error) {
        refuse(`Invalid JSON: ${error.message}`);
        return null;
      }
    }
    return body;
  };

  // A data URL may have millions of characters, which nobody wants to read.
  const shortened = (key, value) => {
    if (typeof value !== "string" || !value.startsWith("data:image/")) return value;
    return `${value.slice(0, 40)}... (${value.length} characters)`;
  };
  const clear = (body) => {
    for (const id of ["answer", "reasoning", "steps", "summary", "error"]) get(id).replaceChildren();
    get("reasoning-box").hidden = get("figures").hidden = true;
    get("no-steps").hidden = false;
    get("request").textContent = JSON.stringify(body, shortened, 2);
  };

  // The records of a stream of server-sent events.
  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const pieces = (text + value).split("\n\n");
      text = pieces.pop();
      for (const piece of pieces) {
        const data = piece.replace(/^data: /, "");
        if (data !== "[DONE]") yield JSON.parse(data);
      }
    }
  }

  const show = (choice) => {
    get("answer").append(choice.delta.content ?? "");
    if (choice.delta.reasoning_content) {
      get("reasoning-box").hidden = false;
      get("reasoning").append(choice.delta.reasoning_content);
    }
    if (!choice.trace) return;
    get("no-steps").hidden = true;
    // The server has escaped whatever the model wrote.
    get("steps").insertAdjacentHTML("beforeend", choice.trace.steps);
    get("summary").innerHTML = choice.trace.summary ?? "";
    get("figures").hidden = !choice.trace.summary;
  };

  const ended = {
    stop: "Done",
    length: "Stopped at the token limit or the context length",
    tool_calls: "Done, with tool calls",
  };

  const send = async (body, signal) => {
    const headers = { "Content-Type": "application/json" };
    const key = get("key")?.value.trim();
    if (key) headers.Authorization = `Bearer ${key}`;
    const options = { method: "POST", headers, body: JSON.stringify(body), signal };
    const response = await fetch("v1/chat/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    const began = performance.now();
    let reason = null;
    let usage = null;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      event.choices.forEach(show);
      reason = event.choices[0]?.finish_reason ?? reason;
      usage = event.usage ?? usage;
    }
    if (!usage) throw new Error("the connection was lost before the answer was complete");
    const seconds = ((performance.now() - began) / 1000).toFixed(2);
    const cached = usage.prompt_tokens_details.cached_tokens;
    return `${ended[reason]}: ${usage.completion_tokens} tokens in ${seconds} s. Prompt: `
      + `${usage.prompt_tokens} tokens${cached ? `, ${cached} of them cached` : ""}.`;
  };

  const setRunning = (controller) => {
    running = controller;
    get("stop").disabled = !running;
    get("run").disabled = Boolean(running);
    get("answer").setAttribute("aria-busy", String(Boolean(running)));
  };

  const run = async () => {
    const body = readForm();
    if (running || !body) return;
    clear(body);
    const controller = new AbortController();
    setRunning(controller);
    get("status").textContent = "Writing \u2026";
    const title = get("answer-title");
    if (title.getBoundingClientRect().top > innerHeight / 2) title.scrollIntoView();
    try {
      get("status").textContent = await send(body, controller.signal);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      get("status").textContent = isStopped ? "Stopped." : "Failed.";
      if (!isStopped) get("error").textContent = error.message;
    } finally {
      const wasInForm = document.activeElement === get("stop");
      setRunning(null);
      if (wasInForm) get("run").focus();
    }
  };

  get("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  get("stop").addEventListener("click", () => running?.abort());
  get("kind").addEventListener("change", (event) => showKind(event.target.value));
  get("example").addEventListener("change", (event) => showExample(examples[event.target.value]));
  if (get("picture")) {
    get("picture").addEventListener("change", async (event) => {
      await addPictures(event.target.files);
      event.target.value = ""; // so that the same file can be chosen again
    });
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      addPictures(event.dataTransfer.files);
    });
    document.addEventListener("paste", (event) => {
      // A word processor puts a picture of its text beside the text.
      if (!event.clipboardData.types.includes("text/plain")) addPictures(event.clipboardData.files);
    });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) get("ask").requestSubmit();
    if (event.key === "Escape") running?.abort();
  });
  showExample(examples[0]);
})();
