"""Facts about C, C++, Rust and Java: rows of the table of syntaxes, how their tests are built, stubs and canaries.

A package's entry in the list has a table `build`:

```
framework = "cc"                    # our own makefile: each test file is a program
[package.NAME.build]
compiler = "cc"                     # or "c++"
flags = "-Iinclude -DHAVE_X"        # from the repository's root
objects = ["src/*.c"]               # patterns of the sources that every test program is linked with
libraries = "-lm"
style = "unity"                     # how a program reports: unity, tap, gtest, marks, or exit (its status alone)
list = "--list"                     # a program told this lists its tests; each then runs in a process of its own
helpers = ["test/main.c"]           # sources linked with the test programs only
before = "cp config.h.in config.h"  # a shell command before the build

framework = "junit"
[package.NAME.build]
sources = ["src/main/java"]         # folders
helpers = ["src/test/java"]         # folders of tests; their files that are no test files are compiled too
resources = ["src/test/resources"]  # folders on the class path
jars = ["junit4.jar"]               # patterns below /usr/share/java
stubs = { "a/B.java" = "..." }      # sources that stand for a library
whole = true                        # compile all sources, also those that no test file names (default: false)
```

`cargo` needs a table that is not empty and reads nothing from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from glm5.tasks.swe.languages.table import SYNTAX, Syntax, pairs, words

LANGUAGES = ("c", "cpp", "rust", "java")
PROGRAM = "program"  # the test that a test program ends with status 0

C_LIKE: dict[str, Any] = {
    "functions": words("function_definition"), "binary": words("binary_expression"), "numbers": words("number_literal"),
    "strings": words("string_literal char_literal"), "truths": words("true false"), "ifs": words("if_statement"),
    "ternaries": words("conditional_expression"), "calls": words("call_expression"),
    "arguments": words("argument_list"),
    "leave": words("return_statement continue_statement break_statement goto_statement throw_statement"),
    "simple": words("expression_statement"), "updates": words("assignment_expression update_expression"),
    "returns": words("return_statement"), "parameters": words("parameter_list"), "names": words("identifier"),
    "missing": "__builtin_trap(); /* to be written */", "negation": "!({})", "nothing": "0",
    "methods": pairs("strchr/strrchr isalpha/isalnum isdigit/isxdigit isupper/islower toupper/tolower strspn/strcspn "
                     "strcmp/strcasecmp min/max MIN/MAX floor/ceil calloc/malloc fmin/fmax front/back begin/end "
                     "push_back/push_front find/rfind lower_bound/upper_bound first/last"),
    "skipped": words("preproc_include preproc_def preproc_function_def struct_specifier enum_specifier type_qualifier "
                     "template_argument_list template_parameter_list static_assert_declaration"),
    "macros": True,
    "assertion": r"^(TEST|ck_assert|assert|CHECK|EXPECT|ASSERT|REQUIRE|VERIFY|XMLTest|JSONTEST|fail_|ok|test)\w*\s*$",
}  # fmt: skip

ROWS: dict[str, Syntax] = {
    "c": Syntax(grammars=dict.fromkeys((".c", ".h"), ("tree_sitter_c", "language")), fence="c", **C_LIKE),
    "cpp": Syntax(
        grammars=dict.fromkeys((".cpp", ".cc", ".cxx", ".hpp", ".hh", ".h", ".hxx"), ("tree_sitter_cpp", "language")),
        fence="cpp", **C_LIKE,
    ),
    "rust": Syntax(
        grammars={".rs": ("tree_sitter_rust", "language")},
        functions=words("function_item"), binary=words("binary_expression"), numbers=words("integer_literal"),
        strings=words("string_literal char_literal"), truths=words("boolean_literal"), ifs=words("if_expression"),
        ternaries=frozenset(), calls=words("call_expression macro_invocation"), arguments=words("arguments"),
        leave=words("return_expression continue_expression break_expression"), simple=words("expression_statement"),
        updates=words("compound_assignment_expr"), returns=words("return_expression"), parameters=words("parameters"),
        names=words("identifier"), missing='unimplemented!("to be written")', negation="!({})", nothing="None",
        methods=pairs("starts_with/ends_with find/rfind min/max trim_start/trim_end is_some/is_none is_ok/is_err "
                      "any/all first/last split_first/split_last to_lowercase/to_uppercase push_front/push_back "
                      "pop_front/pop_back wrapping_add/wrapping_sub saturating_add/saturating_sub "
                      "take_while/skip_while to_ascii_lowercase/to_ascii_uppercase is_ascii_digit/is_ascii_hexdigit "
                      "next/next_back is_ascii_lowercase/is_ascii_uppercase take/skip floor/ceil"),
        skipped=words("use_declaration attribute_item inner_attribute_item type_arguments type_parameters const_item "
                      "struct_item enum_item mod_item where_clause macro_definition"),
        assertion=r"^(assert\w*|check\w*|test\w*)\s*$", fence="rust",
    ),
    "java": Syntax(
        grammars={".java": ("tree_sitter_java", "language")},
        functions=words("method_declaration constructor_declaration"), binary=words("binary_expression"),
        numbers=words("decimal_integer_literal"), strings=words("string_literal character_literal"),
        truths=words("true false"), ifs=words("if_statement"), ternaries=words("ternary_expression"),
        calls=words("method_invocation"), arguments=words("argument_list"),
        leave=words("return_statement throw_statement continue_statement break_statement"),
        simple=words("expression_statement"), updates=words("assignment_expression update_expression"),
        returns=words("return_statement"), parameters=words("formal_parameters"), names=words("identifier"),
        missing='throw new UnsupportedOperationException("to be written");', negation="!({})", nothing="null",
        methods=pairs("startsWith/endsWith indexOf/lastIndexOf toLowerCase/toUpperCase min/max floor/ceil first/last "
                      "isLetter/isDigit isUpperCase/isLowerCase addFirst/addLast pollFirst/pollLast keySet/values "
                      "equals/equalsIgnoreCase replaceFirst/replaceAll hasNext/hasPrevious next/previous "
                      "getFirst/getLast peekFirst/peekLast containsKey/containsValue anyMatch/allMatch"),
        skipped=words("import_declaration package_declaration annotation marker_annotation type_arguments "
                      "type_parameters enum_constant"),
        assertion=r"\bassert\w*\s*$", fence="java",
    ),
}  # fmt: skip
SYNTAX.update(ROWS)

PROTECTED = {
    "c": ("config.h",), "cpp": ("config.h",), "rust": ("Cargo.toml", "Cargo.lock", ".cargo", "build.rs"), "java": (),
}  # fmt: skip
SYSTEM = {
    "c": "gcc libc6-dev make", "cpp": "g++ make libgtest-dev libgmock-dev", "rust": "cargo-web",
    "java": "default-jdk-headless junit4 junit5 libcommons-lang3-java libguava-java libre2j-java",
}  # fmt: skip

STUB = "/* The tests of this file are not shown. */\nint main(void)\n{\n    return 77;\n}\n"
"""Stands for a test program whose tests are all left out: the build goes on, the program counts as skipped."""

CC_CANARY = """\
#include <stdio.h>
#include <string.h>

int main(void)
{
    const char *joined = "@A@/@B@";
    printf("%s:1:@GOOD@:%s\\n", "@FILE@", strncmp(joined, "@A@", 3) == 0 ? "PASS" : "FAIL: differs");
    return strncmp(joined, "@B@/", 4) == 0 ? 0 : 1;
}
"""
TAP_CANARY = CC_CANARY.replace('"%s:1:@GOOD@:%s\\n", "@FILE@", ', '"%s - @GOOD@\\n", ')
TAP_CANARY = TAP_CANARY.replace('"PASS"', '"ok 1"').replace('"FAIL: differs"', '"not ok 1"')
CARGO_CANARY = """\
#[test]
fn @GOOD@() {
    assert_eq!(["@A@", "@B@"].join("/"), "@A@/@B@");
}

#[test]
fn @BAD@() {
    assert_eq!(["@A@", "@B@"].join("/"), "@B@/@A@");
}
"""
JUNIT_CANARY = """\
@HEAD@

public class @CASE@Test {
    @Test
    public void test@Good@() {
        assertEquals("@A@/@B@", String.join("/", "@A@", "@B@"));
    }

    @Test
    public void test@Bad@() {
        assertEquals("@B@/@A@", String.join("/", "@A@", "@B@"));
    }
}
"""
JUNIT = {
    True: "import static org.junit.Assert.assertEquals;\nimport org.junit.Test;",
    False: "import static org.junit.jupiter.api.Assertions.assertEquals;\nimport org.junit.jupiter.api.Test;",
}


def canary(framework: str, build: Mapping[str, Any], beside: str, text: str) -> dict[str, str]:
    """The template of a canary; see `canaries.canary`. `text` is that of the test file `beside`."""
    if framework == "cargo":
        return {"file": "@FILE@.rs", "text": CARGO_CANARY, "good": "@GOOD@", "bad": "@BAD@"}
    if framework == "junit":
        package = next((line for line in text.splitlines() if line.startswith("package ")), "")
        head = package + "\n\n" + JUNIT["org.junit.jupiter" not in text]
        return {"file": "@CASE@Test.java", "text": JUNIT_CANARY.replace("@HEAD@", head), "good": "test@Good@",
                "bad": "test@Bad@"}  # fmt: skip
    template = TAP_CANARY if build["style"] == "tap" else CC_CANARY
    return {"file": "@FILE@." + beside.rsplit(".", 1)[-1], "text": template, "good": "@GOOD@", "bad": PROGRAM}
