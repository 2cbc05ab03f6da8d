"""Kinds of frontend projects: plain HTML, and four frameworks that `npm run build` turns into static files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm5.errors import ConfigError
from glm5.tasks.cc_bench.checks import Page

PACKAGES = Path(__file__).with_name("npm") / "package.json"
"""The packages of all frameworks, with their versions."""
_VITE = (
    'import {{ defineConfig }} from "vite";\nimport {name} from "{plugin}";\n\n'
    "export default defineConfig({{ plugins: [{call}] }});\n"
)
_INDEX = (
    '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Project</title></head>\n'
    '<body><div id="root"></div><script type="module" src="/src/{main}"></script></body>\n</html>\n'
)
_START = "const body = {body};\nfunction start() {{\n{script}}}\n"


@dataclass(frozen=True)
class Kind:
    """`build` is a line for bash, run in the project's folder; `output` is the folder with the built files. `starter`
    are the files that a project begins with, `reference` adds those of a page. `needs` are npm packages."""

    name: str
    about: str
    output: str
    build: str = ""
    needs: tuple[str, ...] = ()
    starter: Mapping[str, str] = field(default_factory=dict)
    reference: Callable[[Page, str], dict[str, str]] = lambda page, title: {"index.html": page.html(title)}
    memory_mb: int = 1024

    def project(self, page: Page, title: str) -> dict[str, str]:
        """All files of a project that shows the page."""
        return {**self.starter, **self.reference(page, title)}


def _package(build: str) -> str:
    return (
        json.dumps({"name": "project", "private": True, "type": "module", "scripts": {"build": build}}, indent=2) + "\n"
    )


def _vite(plugin: str, name: str, call: str, main: str, code: str) -> dict[str, str]:
    return {
        "package.json": _package("vite build"), "index.html": _INDEX.format(main=main),
        "vite.config.js": _VITE.format(plugin=plugin, name=name, call=call), f"src/{main}": code,
    }  # fmt: skip


def _code(page: Page) -> str:
    return _START.format(body=json.dumps(page.body), script=page.script)


def _react(page: Page, title: str, file: str = "src/App.jsx", head: str = "") -> dict[str, str]:
    style = f"{Path(file).parent}/page.css"
    text = f'{head}import {{ useEffect }} from "react";\nimport "./page.css";\n\n{_code(page)}\n'
    text += "export default function App() {\n  useEffect(start, []);\n"
    text += "  return <div dangerouslySetInnerHTML={{ __html: body }} />;\n}\n"
    return {file: text, style: page.style}


def _next(page: Page, title: str) -> dict[str, str]:
    return _react(page, title, "app/page.jsx", '"use client";\n')


def _vue(page: Page, title: str) -> dict[str, str]:
    text = f'<script setup>\nimport {{ onMounted }} from "vue";\n\n{_code(page)}\nonMounted(start);\n</script>\n\n'
    return {
        "src/App.vue": f'{text}<template>\n<div v-html="body"></div>\n</template>\n\n<style>\n{page.style}</style>\n'
    }


def _svelte(page: Page, title: str) -> dict[str, str]:
    text = f'<script>\nimport {{ onMount }} from "svelte";\nimport "./page.css";\n\n{_code(page)}\nonMount(start);\n'
    return {"src/App.svelte": f"{text}</script>\n\n{{@html body}}\n", "src/page.css": page.style}


_MOUNT = {
    "react": 'import { createRoot } from "react-dom/client";\nimport App from "./App.jsx";\n\n'
    'createRoot(document.getElementById("root")).render(<App />);\n',
    "vue": 'import { createApp } from "vue";\nimport App from "./App.vue";\n\ncreateApp(App).mount("#root");\n',
    "svelte": 'import { mount } from "svelte";\nimport App from "./App.svelte";\n\n'
    'mount(App, { target: document.getElementById("root") });\n',
}
_LAYOUT = (
    'export const metadata = { title: "Project" };\n\nexport default function Layout({ children }) {\n'
    '  return <html lang="en"><body>{children}</body></html>;\n}\n'
)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("html", "plain HTML, CSS and JavaScript without a build; index.html opens the page", "."),
        Kind("react", "React with Vite; src/main.jsx mounts src/App.jsx, which you write", "dist", "npm run build",
             ("react", "react-dom", "vite", "@vitejs/plugin-react"),
             _vite("@vitejs/plugin-react", "react", "react()", "main.jsx", _MOUNT["react"]), _react, 2048),
        Kind("vue", "Vue with Vite; src/main.js mounts src/App.vue, which you write", "dist", "npm run build",
             ("vue", "vite", "@vitejs/plugin-vue"),
             _vite("@vitejs/plugin-vue", "vue", "vue()", "main.js", _MOUNT["vue"]), _vue, 2048),
        Kind("svelte", "Svelte with Vite; src/main.js mounts src/App.svelte, which you write", "dist", "npm run build",
             ("svelte", "vite", "@sveltejs/vite-plugin-svelte"),
             _vite("@sveltejs/vite-plugin-svelte", "{ svelte }", "svelte()", "main.js", _MOUNT["svelte"]), _svelte,
             2048),
        Kind("next", "Next.js with static export; app/layout.jsx is there, app/page.jsx you write", "out",
             "npm run build",
             ("next", "react", "react-dom"),
             {"package.json": _package("next build"), "app/layout.jsx": _LAYOUT,
              "next.config.mjs": 'export default { output: "export" };\n'}, _next, 4096),
    )
}  # fmt: skip


def find_kind(name: str, packages: str) -> Kind:
    """The kind, if the folder `packages` has what it is built with. Raises ConfigError."""
    if name not in KINDS:
        raise ConfigError(f'There is no kind of frontend "{name}"; there are {", ".join(KINDS)}.')
    kind = KINDS[name]
    missing = [one for one in kind.needs if not (Path(packages) / "node_modules" / one / "package.json").is_file()]
    if missing and not packages:
        raise ConfigError(
            f"{name} projects are built with npm packages: copy glm5/tasks/cc_bench/npm/package.json into a "
            "folder DIR, run `npm install --prefix DIR`, and say --set packages=DIR; or play --part html alone."
        )
    if missing:
        raise ConfigError(
            f"{name} projects need the npm package {missing[0]}, which is not in {packages}/node_modules."
        )
    return kind
