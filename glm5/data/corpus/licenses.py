"""Licenses of files and packages, from what they say of themselves. A license is an expression of SPDX,
`spdx.UNKNOWN` if what is said is not understood, or empty if nothing is said."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from glm5.data.corpus.kinds import file_type
from glm5.data.corpus.spdx import UNKNOWN, all_of, normal
from glm5.files import read_small

_MOST = 1 << 20
_NEAR = 3000  # characters from the start of a file
_MOST_METADATA = 16 << 20  # bytes; the largest packages list tens of thousands of files
_TAG = re.compile(r"SPDX-License-Identifier:([^\n]*)")
_END_OF_COMMENT = re.compile(r"""(?:\*\)|[#-]\}|\|?#|["'`*])$""")
_RESTRICTED = (
    ("BUSL-1.1", r"business source license"),
    ("LicenseRef-Commons-Clause", r"commons clause"),
    ("SSPL-1.0", r"server side public license"),
    ("Elastic-2.0", r"elastic license"),
)
"""These quote or change another license, whose text then says nothing."""
_SECONDARY = r"secondary license.{0,3} means .{0,300}? or any later versions of those licenses"
"""Where the Mozilla license names others."""
_FAMILIES = (
    (("MPL-2.0", r"mozilla public license,?\s+(?:version|v\.) 2\.0"),),
    (
        ("AGPL-3.0-or-later", r"gnu affero general public license"),
        ("LGPL-2.1-or-later", r"gnu (?:lesser|library) general public license"),
        ("GPL-3.0-or-later", r"gnu general public license\s+(?:as published .{0,80}?)?(?:either )?version 3"),
        ("GPL-2.0-or-later", r"gnu general public license|\bgpl ?-?v?[23]\b"),
    ),
    (("Apache-2.0", r"apache license,?\s+version 2\.0"),),
    (
        ("BSD-3-Clause", r"redistributions? (?:and use )?in source and binary forms.{0,1500}neither the names?"),
        ("BSD-2-Clause", r"redistributions? (?:and use )?in source and binary forms"),
    ),
    (("MIT", r"permission is hereby granted, free of charge, to any person obtaining a copy"),),
    (("ISC", r"permission to use, copy, modify, and/?(?:or)? distribute this software for any purpose with or"),),
    (("Unlicense", r"this is free and unencumbered software released into the public domain"),),
    (("PSF-2.0", r"python software foundation license"),),
)
_SHORT = {
    "apache": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache license 2.0": "Apache-2.0", "apache-2": "Apache-2.0",
    "apache software license": "Apache-2.0", "apache 2.0 license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0", "3-clause bsd license": "BSD-3-Clause", "isc license (iscl)": "ISC",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0", "bsd": "BSD-3-Clause", "bsd license": "BSD-3-Clause",
    "bsd-2": "BSD-2-Clause", "bsd-3": "BSD-3-Clause", "expat": "MIT", "mit license": "MIT", "psf": "PSF-2.0",
    "python software foundation license": "PSF-2.0", "isc license": "ISC", "the unlicense (unlicense)": "Unlicense",
    "gnu general public license v2 (gplv2)": "GPL-2.0-only", "gnu general public license v3 (gplv3)": "GPL-3.0-only",
    "gnu general public license v2 or later (gplv2+)": "GPL-2.0-or-later",
    "gnu general public license v3 or later (gplv3+)": "GPL-3.0-or-later",
    "gnu lesser general public license v3 (lgplv3)": "LGPL-3.0-only",
    "gpl": "GPL-2.0-or-later", "gpl-1+": "GPL-1.0-or-later", "gpl-2": "GPL-2.0-only", "gpl-2+": "GPL-2.0-or-later",
    "gpl-3": "GPL-3.0-only", "gpl-3+": "GPL-3.0-or-later", "lgpl-2+": "LGPL-2.0-or-later",
    "lgpl-2.1": "LGPL-2.1-only", "lgpl-2.1+": "LGPL-2.1-or-later", "lgpl-3+": "LGPL-3.0-or-later",
    "lgpl": "LGPL-2.1-or-later",
    "public-domain": "LicenseRef-public-domain",
}  # fmt: skip


def tagged(text: str) -> str:
    """What the SPDX tags near the start of a file say; UNKNOWN for one that is no expression."""
    lines = (found[1] for found in _TAG.finditer(text[: _NEAR + _MOST]) if found.start() < _NEAR)
    tags = (_END_OF_COMMENT.sub("", re.split(r"\*/|-->", line, maxsplit=1)[0].strip()).strip() for line in lines)
    return all_of(normal(tag) or UNKNOWN for tag in tags)


def recognised(text: str) -> str:
    """The license whose text, or whose usual notice, this is; empty if there are several of different families."""
    names = _recognised(text)
    return names[0] if len(names) == 1 else ""


def _recognised(text: str) -> list[str]:
    plain = " ".join(text[:_MOST].lower().split())
    for name, pattern in _RESTRICTED:
        if re.search(pattern, plain):
            return [name]
    plain = re.sub(_SECONDARY, "", plain)
    return list(filter(None, (_first(family, plain) for family in _FAMILIES)))


def _first(family: Iterable[tuple[str, str]], plain: str) -> str:
    """The license of a family that a text names first, as a license does in its title; at one place the narrower."""
    found = [(match.start(), name) for name, pattern in family if (match := re.search(pattern, plain))]
    return min(found, key=lambda one: one[0], default=(0, ""))[1]


def spdx(name: str) -> str:
    """SPDX's name for a common short one, or the expression that it is; UNKNOWN for anything else that is not empty."""
    name = " ".join(name.split())
    return _SHORT.get(name.lower()) or normal(name)


class Licenses:
    """Licenses by the top folders of a source: Python packages by their metadata, Debian's documentation by its
    `copyright`, other folders by their license file. Untrusted text; what cannot be read says nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, str] = {}
        claimed: dict[str, set[str]] = defaultdict(set)
        for folder in _listed(root):
            if folder.suffix not in (".dist-info", ".egg-info") or folder.is_symlink():
                continue
            distribution = _Distribution(folder)
            try:
                license = _of_metadata(distribution)
                tops = {file.parts[0] for file in distribution.files or ()}
            except Exception:  # its parsers of hostile files raise almost anything
                continue
            for top in tops:
                claimed[top].add(license)
        self._claimed = {top: all_of(licenses) for top, licenses in claimed.items()}

    def of(self, name: str) -> str:
        """The license of the file `name`, relative to the root: what its folder's own license files say, all of them,
        else what all packages say that list files in it."""
        top = name.partition("/")[0]
        if top not in self._known:
            own = self._own(self._root / top)
            self._known[top] = self._claimed.get(top, "") if own is None else own
        return self._known[top]

    def _own(self, folder: Path) -> str | None:
        """What the license files of a folder say; None if it has none, empty if one of them has several licenses."""
        found: str | None = None
        for path in _listed(folder):
            kind = file_type(path.name)
            if not path.name.lower().startswith(("copyright", "licen", "copying")) or path.is_symlink():
                continue
            if kind is not None and kind.kind == "code":
                continue
            try:
                text = read_small(path, _MOST).decode("utf-8", "replace")
            except OSError:
                continue
            said = of_copyright(text)
            names = [said] if said else _recognised(text)
            if len(names) > 1:
                return ""
            found = all_of([found or "", *names])
        return found


def _listed(folder: Path) -> list[Path]:
    """What a folder contains, in order; nothing for a link, or for what is no folder that can be read."""
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except OSError:
        return []


class _Distribution(importlib.metadata.PathDistribution):
    """An installed package whose files are hostile: none is a link, a pipe or a device, or large."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_text(self, filename: str | os.PathLike[str]) -> str | None:
        path = self._folder / filename
        try:
            return None if path.is_symlink() else read_small(path, _MOST_METADATA).decode("utf-8", "replace")
        except OSError:
            return None


def of_copyright(text: str) -> str:
    """The license of all files in Debian's machine-readable form."""
    _, _, rest = text.partition("\nFiles: *\n")
    _, _, field = f"\n{rest}".partition("\nLicense: ")
    field = " ".join(field.partition("\n")[0].split())
    if "," in field:  # it says that "or" binds tighter than "and"
        return UNKNOWN
    names = re.split(" (and|or) ", field, flags=re.IGNORECASE)
    return normal(" ".join(name.upper() if index % 2 else spdx(name) for index, name in enumerate(names)))


def _of_metadata(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    if "License-Expression" in metadata:
        return normal(str(metadata["License-Expression"]))
    said = [line.rpartition(":: ")[2] for line in metadata.get_all("Classifier") or () if line.startswith("License ::")]
    names = [name for name in said if name != "OSI Approved"]
    return all_of(map(spdx, names)) if names else spdx(str(metadata["License"])) if "License" in metadata else ""
