"use strict";
// Keys and details of the tokens on a page. Rows of tokens may be added while it is open.
(() => {
  const rows = () => [...document.querySelectorAll(".chips")]
    .map((row) => [...row.querySelectorAll("button")])
    .filter((row) => row.length > 0);

  // One stop of the Tab key for each row: the token that was chosen last.
  const prepared = new WeakSet();
  const prepare = () => {
    for (const row of document.querySelectorAll(".chips")) {
      if (prepared.has(row)) continue;
      prepared.add(row);
      row.querySelectorAll("button").forEach((button, at) => {
        button.tabIndex = at === 0 ? 0 : -1;
      });
    }
  };
  const choose = (chip) => {
    for (const other of chip.closest(".chips").querySelectorAll('button[tabindex="0"]')) {
      other.tabIndex = -1;
    }
    chip.tabIndex = 0;
  };

  const target = (key, chip) => {
    const all = rows();
    const y = all.findIndex((row) => row.includes(chip));
    const x = all[y].indexOf(chip);
    const clamp = (row) => row[Math.min(x, row.length - 1)];
    switch (key) {
      case "ArrowLeft": return all[y][x - 1] ?? all[y - 1]?.at(-1);
      case "ArrowRight": return all[y][x + 1] ?? all[y + 1]?.[0];
      case "ArrowUp": return all[y - 1] && clamp(all[y - 1]);
      case "ArrowDown": return all[y + 1] && clamp(all[y + 1]);
      case "Home": return all[y][0];
      case "End": return all[y].at(-1);
      default: return undefined;
    }
  };
  const isChip = (element) => element.matches(".chips button.chip");

  prepare();
  new MutationObserver(prepare).observe(document.body, { childList: true, subtree: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.body.classList.add("quiet");
    if (!isChip(event.target) || event.ctrlKey || event.altKey || event.metaKey) return;
    const next = target(event.key, event.target);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  document.addEventListener("focusin", (event) => {
    document.body.classList.remove("quiet");
    if (!isChip(event.target)) return;
    choose(event.target);
    const chip = event.target.getBoundingClientRect();
    const tip = event.target.nextElementSibling.getBoundingClientRect();
    if (chip.right > tip.left) scrollBy(0, Math.max(0, chip.bottom + 8 - tip.top));
  });
  document.addEventListener("pointerover", (event) => {
    if (event.target.closest(".chip")) document.body.classList.remove("quiet");
  });
})();
