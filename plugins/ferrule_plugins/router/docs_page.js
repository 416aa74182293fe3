// Sends what a form holds to this server, and shows the answer as it arrives.
"use strict";

const base = location.pathname.replace(/\/docs\/?$/, "");

async function send(form) {
  const out = form.querySelector("pre");
  const body = form.querySelector("textarea");
  const key = document.querySelector("#key").value;
  const headers = {};
  if (key) headers["Authorization"] = "Bearer " + key;
  if (body) headers["Content-Type"] = "application/json";
  out.hidden = false;
  out.textContent = "…";
  const answer = await fetch(base + form.querySelector("input").value, {
    method: form.dataset.method,
    headers,
    body: body ? body.value : undefined,
  });
  const head = `${answer.status} ${answer.statusText}\n\n`;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  out.textContent = head;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
    out.textContent += value;
  }
  if ((answer.headers.get("content-type") || "").startsWith("application/json")) {
    out.textContent = head + JSON.stringify(JSON.parse(text), null, 2);
  }
}

for (const form of document.querySelectorAll("form")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      await send(form);
    } catch (error) {
      form.querySelector("pre").textContent += error;
    }
    button.disabled = false;
  });
}

function openNamed() {
  const found = document.getElementById(location.hash.slice(1));
  if (found) found.open = true;
}
addEventListener("hashchange", openNamed);
openNamed();
