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
  const ownText = (element) => {
    const rects = [];
    let text = "";
    for (const node of element.childNodes) {
      if (node.nodeType !== 3 || !node.data.trim()) continue;
      text += (text ? " " : "") + node.data.trim().replace(/\s+/g, " ");
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const r of range.getClientRects()) {
        if (rects.length >= limits.rects || lines >= limits.lines) { more ||= lines >= limits.lines; break; }
        if (r.width > 0 || r.height > 0) { rects.push(rect(r)); lines++; }
      }
    }
    return [text.slice(0, limits.text).toWellFormed(), rects];
  };
  const walk = (element, parent, opacity, clip, scale, tricks) => {
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
    mark("zoom", zoom !== 1);
    let grown = scale;
    if (style.transform !== "none") {
      const m = new DOMMatrixReadOnly(style.transform);
      const sx = Math.hypot(m.m11, m.m12), sy = Math.hypot(m.m21, m.m22);
      grown = scale * Math.sqrt(Math.abs(m.m11 * m.m22 - m.m12 * m.m21));
      mark("transform-scale", Math.abs(sx - 1) > 0.01 || Math.abs(sy - 1) > 0.01);
      mark("transform-3d", !m.is2D);
      mark("turned-over", m.m11 < -0.3 || m.m22 < -0.3);
    }
    if (style.scale && style.scale !== "none" && style.scale !== "1") {
      const s = style.scale.split(" ").map(Number);
      grown *= Math.sqrt(Math.abs(s[0] * (s[1] ?? s[0])));
      mark("transform-scale", true);
    }
    mark("scrambled", style.unicodeBidi.includes("override") || (style.webkitTextSecurity || "none") !== "none");
    mark("text-indent", Math.abs(parseFloat(style.textIndent) || 0) > 100);
    const cuts = style.overflowX !== "visible" || style.overflowY !== "visible";
    mark("cut-text", cuts && (style.textOverflow !== "clip" || (style.webkitLineClamp || "none") !== "none") &&
      (element.scrollWidth > element.clientWidth + 2 || element.scrollHeight > element.clientHeight + 2));
    const [text, rects] = ownText(element);
    if (text) { box.text = text; box.rects = rects; }
    box.clip = text && cuts ? cut(clip, rect(own)) : clip;
    const background = colour(style.backgroundColor);
    Object.assign(box.style, {
      size: round(parseFloat(style.fontSize) * grown),
      family: style.fontFamily.split(",")[0].replace(/["']/g, "").trim().toLowerCase().slice(0, 60),
      weight: +style.fontWeight || 400,
      colour: colour(style.color),
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
      box.source = tag === "img" ? (element.getAttribute("src") || "").slice(0, 300).toWellFormed() : tag;
      box.natural = tag === "img" ? [element.naturalWidth, element.naturalHeight] : [0, 0];
      box.fit = style.objectFit;
      box.loaded = tag !== "img" || (element.complete && element.naturalWidth > 0);
      if (tag === "svg") { box.text = (element.textContent || "").trim().slice(0, limits.text).toWellFormed(); return; }
    }
    let inner = clip;
    if (cuts) inner = style.position === "fixed" ? rect(own) : cut(clip, rect(own));
    else if (style.position === "fixed") inner = all;
    for (const child of element.children) walk(child, id, alpha, inner, grown, here);
  };
  if (document.body) walk(document.body, -1, 1, all, 1, []);
  const html = document.documentElement, body = document.body;
  const tall = Math.max(html.scrollHeight, html.offsetHeight, body ? body.scrollHeight : 0, body ? body.offsetHeight : 0);
  const wide = Math.max(html.scrollWidth, body ? body.scrollWidth : 0);
  return { boxes, more, height: tall, width: wide, elements: document.getElementsByTagName("*").length };
}
