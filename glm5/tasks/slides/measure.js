// Run by the renderer inside a page whose own scripts are off. Returns the box tree as plain data; see boxes.py.
(limits) => {
  const round = (x) => Math.round(x * 100) / 100;
  const rect = (r) => [round(r.left + scrollX), round(r.top + scrollY), round(r.width), round(r.height)];
  const boxes = [], elements = [];
  globalThis.measured = elements; // the page's own scripts are off, so nobody else can touch it
  let more = false, lines = 0;
  const colour = (text) => {
    const m = /^rgba?\(([\d.]+), ([\d.]+), ([\d.]+)(?:, ([\d.]+))?\)$/.exec(text);
    return m ? [+m[1], +m[2], +m[3], m[4] === undefined ? 1 : +m[4]] : null; // null: a form such as color(srgb ...)
  };
  const cut = (a, b) => {
    const x = Math.max(a[0], b[0]), y = Math.max(a[1], b[1]);
    return [x, y, Math.max(0, Math.min(a[0] + a[2], b[0] + b[2]) - x), Math.max(0, Math.min(a[1] + a[3], b[1] + b[3]) - y)];
  };
  const all = [-1e7, -1e7, 2e7, 2e7];
  const second = innerHeight > 10;
  const inFlow = (style, rtl) => (style.display.startsWith("inline") || style.display === "contents") && !rtl &&
    style.transform === "none" && style.translate === "none" && style.offsetPath === "none" &&
    parseFloat(style.marginLeft) > -5 &&
    !(style.position === "relative" && [style.left, style.top].some((x) => Math.abs(parseFloat(x)) > 5));
  const quoted = (value) => (value.match(/"(?:[^"\\]|\\.)*"/g) || []).join(" ");
  // The linear part of an element's own transforms, or null without any.
  const turned = (style) => {
    if (style.transform === "none" && style.rotate === "none" && style.scale === "none") return null;
    const m = new DOMMatrix(), angles = style.rotate.split(" "), s = style.scale.split(" ").map(Number);
    if (style.rotate !== "none")
      m.multiplySelf(new DOMMatrix(angles.length === 1 ? `rotate(${style.rotate})` : "rotateX(90deg)")); // about an axis
    if (style.scale !== "none") m.scaleSelf(s[0], s[1] ?? s[0]);
    try {
      if (style.transform !== "none") m.multiplySelf(new DOMMatrix(style.transform));
    } catch { // numbers without end
      m.rotateAxisAngleSelf(1, 0, 0, 90);
    }
    return m;
  };
  // The share of a picture that its own box, clipping, or opaque elements on it do not cut away, on a grid of points.
  const uncut = (element, style, r) => {
    const [w, h] = [r.width, r.height], [nw, nh] = [element.naturalWidth, element.naturalHeight];
    const faint = /(?:brightness|contrast)\((?:0(?:\.[0-2]\d*)?)\)/.test(style.filter);
    let share = style.objectViewBox !== "none" || style.content !== "normal" || faint ? 0 : 1;
    if (nw && nh && w && h && style.objectFit === "cover") share *= (w * h) / (Math.max(w / nw, h / nh) ** 2 * nw * nh);
    if (nw && nh && style.objectFit === "none") share *= (Math.min(w, nw) * Math.min(h, nh)) / (nw * nh);
    if (!second) return share;
    const opaque = (s) => (colour(s.backgroundColor) || [0, 0, 0, 1])[3] >= 0.5 || s.backgroundImage !== "none";
    const clear = (e) => {
      const generated = ["::before", "::after"].map((p) => getComputedStyle(e, p)).filter((s) => s.content !== "none");
      if (generated.some(opaque) || ["img", "svg", "canvas", "video"].includes(e.localName)) return false;
      return (generated.length && e.contains(element)) || !opaque(getComputedStyle(e)); // what is on it is not around it
    };
    let seen = 0;
    for (let i = 0; i < 36; i++) {
      const at = [r.left + ((i % 6) + 0.5) * w / 6, r.top + (Math.floor(i / 6) + 0.5) * h / 6];
      const stack = document.elementsFromPoint(...at), place = stack.indexOf(element);
      seen += place >= 0 && stack.slice(0, place).every(clear);
    }
    return share * seen / 36;
  };
  // What an element says, with U+FFFC for each child that flows in its lines; see `boxes.Box.flow`.
  const flowOf = (element, style, kids) => {
    const size = parseFloat(style.fontSize), gaps = size >= 6 && !(parseFloat(style.letterSpacing) < -0.15 * size);
    let flow = "", any = false;
    for (const node of element.childNodes) {
      const kid = node.nodeType === 1 ? boxes[kids.get(node)] : undefined;
      if (node.nodeType === 3 && (gaps || node.data.trim())) flow += node.data.replace(/\s+/g, " ").replaceAll("\ufffc", "");
      else if (kid?.inline) { flow += "\ufffc"; any = true; }
      else if (node.nodeType === 1 && !kid?.hidden) flow += node.localName === "br" ? " " : "\n";
    }
    return any ? flow.slice(0, 4 * limits.text).toWellFormed() : "";
  };
  const ownText = (element, upright) => {
    const rects = [];
    let text = "", thick = 1e7;
    for (const node of element.childNodes) {
      if (node.nodeType !== 3 || !node.data.trim()) continue;
      text += (text ? " " : "") + node.data.trim().replace(/\s+/g, " ");
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const r of range.getClientRects()) {
        if (rects.length >= limits.rects || lines >= limits.lines) { more ||= lines >= limits.lines; break; }
        if (r.width > 0 || r.height > 0) {
          rects.push(rect(r));
          lines++;
          thick = Math.min(thick, upright ? r.height : r.width);
        }
      }
    }
    return [text.slice(0, limits.text).toWellFormed(), rects, thick];
  };
  const walk = (element, parent, opacity, clip, turn, tricks, rtl) => {
    if (boxes.length >= limits.nodes) { more = true; return; }
    const style = getComputedStyle(element);
    const tag = element.localName;
    if (["script", "style", "head", "meta", "link", "title", "template", "noscript", "br"].includes(tag)) return;
    if (style.display === "none") {
      const hidden = (element.textContent || "").trim();
      if (hidden) boxes.push({ tag, parent, hidden: hidden.slice(0, limits.text).toWellFormed() });
      return;
    }
    const id = boxes.length;
    const own = element.getBoundingClientRect();
    const box = { tag, parent, rect: rect(own), style: {} };
    boxes.push(box);
    elements[id] = element;
    const alpha = opacity * (+style.opacity);
    const zoom = style.zoom ? +style.zoom : 1;
    let here = tricks;
    const mark = (name, on) => { if (on && !here.includes(name)) here = [...here, name]; };
    mark("blur", /blur\((?!0px)|opacity\(0/.test(style.filter));
    mark("drawn-filter", style.filter.includes("url(") || style.webkitBoxReflect !== "none");
    mark("moving", restless.has(element));
    mark("masked", style.maskImage !== "none");
    mark("odd-font", style.fontSizeAdjust !== "none" || style.textEmphasisStyle !== "none");
    mark("struck-out", style.textDecorationLine.includes("line-through"));
    mark("on-a-path", style.offsetPath !== "none");
    mark("zoom", zoom !== 1);
    const m = turned(style);
    const total = m ? turn.multiply(m) : turn;
    const grown = Math.sqrt(Math.abs(total.m11 * total.m22 - total.m12 * total.m21));
    if (m) {
      const sx = Math.hypot(m.m11, m.m12), sy = Math.hypot(m.m21, m.m22);
      mark("transform-scale", Math.abs(sx - 1) > 0.01 || Math.abs(sy - 1) > 0.01);
      mark("transform-3d", !m.is2D);
      mark("turned-over", total.m11 < -0.3 || total.m22 < -0.3 || total.m11 * total.m22 < total.m12 * total.m21);
    }
    mark("scrambled", style.unicodeBidi.includes("override") || (style.webkitTextSecurity || "none") !== "none");
    mark("text-indent", Math.abs(parseFloat(style.textIndent) || 0) > 100);
    const cuts = style.overflowX !== "visible" || style.overflowY !== "visible";
    mark("cut-text", cuts && (style.textOverflow !== "clip" || (style.webkitLineClamp || "none") !== "none") &&
      (element.scrollWidth > element.clientWidth + 2 || element.scrollHeight > element.clientHeight + 2));
    const [text, rects, thick] = ownText(element, style.writingMode === "horizontal-tb");
    if (text) { box.text = text; box.rects = rects; }
    if (inFlow(style, rtl)) box.inline = true;
    mark("scrambled", parseFloat(style.wordSpacing) < -0.12 * parseFloat(style.fontSize)); // no gaps between words
    mark("scrambled", /[\u202a-\u202e\u2066-\u2069]/.test(text));
    let said = quoted(style.listStyleType);
    if (limits.generated) for (const p of ["::before", "::after", "::marker"]) said += quoted(getComputedStyle(element, p).content);
    if (/[\p{L}\p{N}]/u.test(said)) box.said = said.slice(0, limits.text).toWellFormed();
    box.clip = text && cuts ? cut(clip, rect(own)) : clip;
    const background = colour(style.backgroundColor), size = parseFloat(style.fontSize) * grown;
    Object.assign(box.style, {
      size: round(thick < 0.85 * size ? thick / 1.1 : size), // a line of our fonts is 1.0 to 1.16 of its size
      family: style.fontFamily.split(",")[0].replace(/["']/g, "").trim().toLowerCase().slice(0, 60),
      weight: +style.fontWeight || 400,
      colour: colour(style.webkitTextFillColor),
      background,
      picture: style.backgroundImage !== "none" ? (style.backgroundImage.includes("url(") ? "url" : "gradient") : "",
      border: ["Top", "Left", "Right", "Bottom"].some((s) => parseFloat(style[`border${s}Width`]) > 0 &&
        style[`border${s}Style`] !== "none" && (colour(style[`border${s}Color`]) || [0, 0, 0, 1])[3] > 0),
      shadow: style.boxShadow !== "none",
      opacity: round(alpha),
      hidden: style.visibility !== "visible",
      position: style.position,
      z: style.zIndex === "auto" ? 0 : +style.zIndex || 0,
      overflow: style.overflowX === "visible" && style.overflowY === "visible" ? "visible" : style.overflowY,
      align: style.textAlign,
      gradient_text: style.backgroundClip === "text",
      spacing: parseFloat(style.letterSpacing) || 0,
      line: parseFloat(style.lineHeight) || 0,
    });
    if (here.length) box.tricks = here;
    if (tag === "img" || tag === "svg" || tag === "canvas" || tag === "video") {
      const [address, source] = [element.currentSrc, element.getAttribute("src") || ""];
      const name = limits.names[address] || (limits.names[source] ? "another picture" : source.slice(0, 300));
      box.source = tag === "img" ? name.toWellFormed() : tag;
      if (tag === "img") { box.whole = round(uncut(element, style, own)); delete box.inline; }
      box.natural = tag === "img" ? [element.naturalWidth, element.naturalHeight] : [0, 0];
      box.fit = style.objectFit;
      box.loaded = tag !== "img" || (element.complete && element.naturalWidth > 0);
      if (tag === "svg") { box.text = (element.textContent || "").trim().slice(0, limits.text).toWellFormed(); return; }
    }
    let inner = clip;
    if (cuts) inner = style.position === "fixed" ? rect(own) : cut(clip, rect(own));
    else if (style.position === "fixed") inner = all;
    const kids = new Map();
    for (const child of element.children) {
      const next = boxes.length;
      walk(child, id, alpha, inner, total, here, style.direction === "rtl");
      if (boxes.length > next) kids.set(child, next);
    }
    const flow = kids.size ? flowOf(element, style, kids) : "";
    if (flow) box.flow = flow;
  };
  const sheets = document.adoptedStyleSheets, hit = new CSSStyleSheet(); // every element can be hit while it is measured
  hit.replaceSync(`@layer ${limits.layer} { *, *::before, *::after { pointer-events: auto !important } }`);
  if (second && document.images.length) document.adoptedStyleSheets = [...sheets, hit];
  if (document.body) walk(document.documentElement, -1, 1, all, new DOMMatrix(), [], false);
  if (document.adoptedStyleSheets.length > sheets.length) document.adoptedStyleSheets = [...sheets];
  const html = document.documentElement, body = document.body;
  const tall = Math.max(html.scrollHeight, html.offsetHeight, body ? body.scrollHeight : 0, body ? body.offsetHeight : 0);
  const wide = Math.max(html.scrollWidth, body ? body.scrollWidth : 0);
  return { boxes, more, height: tall, width: wide, elements: document.getElementsByTagName("*").length };
}
