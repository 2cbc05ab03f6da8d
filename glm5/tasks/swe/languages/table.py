"""Facts about each language: the names of its grammar's nodes and what its operators replace. Code is in the other
modules; a new language is a new row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Words = frozenset[str]


def words(text: str) -> Words:
    return frozenset(text.split())


def pairs(text: str) -> dict[str, str]:
    """ "a/b c/d" as a mapping in both directions."""
    both = [part.split("/") for part in text.split()]
    return {a: b for x, y in both for a, b in ((x, y), (y, x))}


@dataclass(frozen=True)
class Syntax:
    """Node names of a tree-sitter grammar and replacements of tokens.

    `grammars` maps a file suffix to (module, function) of the grammar's Python package. `functions` are definitions,
    `leave` ends a function or a loop's turn, `simple` are statements without inner ones. `missing` is what a function
    without its body does; `negation` wraps a condition; `erased` are types, which are gone when the program runs.
    """

    grammars: Mapping[str, tuple[str, str]]
    functions: Words
    binary: Words
    numbers: Words
    strings: Words
    truths: Words
    ifs: Words
    ternaries: Words
    calls: Words
    arguments: Words
    leave: Words
    simple: Words
    updates: Words
    returns: Words
    parameters: Words
    names: Words
    missing: str
    negation: str
    nothing: str
    methods: Mapping[str, str] = field(default_factory=dict)
    skipped: Words = frozenset()
    tests: Words = frozenset()
    assertion: str = ""
    fence: str = ""
    macros: bool = False
    erased: Words = frozenset()


COMPARE = {
    "<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",),
    "===": ("!==",), "!==": ("===",),
}  # fmt: skip
ARITHMETIC = {
    "+": ("-",), "-": ("+",), "*": ("/", "+"), "/": ("*",), "%": ("/",), "<<": (">>",), ">>": ("<<",), "&": ("|",),
    "|": ("&",), "^": ("|",), "**": ("*",),
}  # fmt: skip
CONNECTIVES = {"&&": "||", "||": "&&", "and": "or", "or": "and", "??": "||"}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "+=", "||=": "=", "++": "--", "--": "++", "&=": "|=", "|=": "&="}
ORDER = {"break_statement": "continue", "continue_statement": "break", "break": "next", "next": "break"}

ECMASCRIPT = {
    "functions": words("function_declaration method_definition arrow_function function_expression "
                       "generator_function_declaration generator_function"),
    "binary": words("binary_expression"), "numbers": words("number"),
    "strings": words("string template_string"), "truths": words("true false"), "ifs": words("if_statement"),
    "ternaries": words("ternary_expression"), "calls": words("call_expression new_expression"),
    "arguments": words("arguments"),
    "leave": words("return_statement throw_statement continue_statement break_statement"),
    "simple": words("expression_statement"), "updates": words("augmented_assignment_expression update_expression"),
    "returns": words("return_statement"), "parameters": words("formal_parameters"), "names": words("identifier"),
    "missing": 'throw new Error("to be written");', "negation": "!({})", "nothing": "undefined",
    "methods": pairs("startsWith/endsWith indexOf/lastIndexOf toLowerCase/toUpperCase trimStart/trimEnd push/unshift "
                     "shift/pop min/max floor/ceil some/every find/findIndex keys/values charAt/charCodeAt "
                     "getFullYear/getYear getHours/getUTCHours forEach/map isNaN/isFinite parseInt/parseFloat"),
    "skipped": words("import_statement export_clause type_annotation type_arguments type_parameters decorator "
                     "template_string interface_declaration type_alias_declaration enum_declaration"),
    "tests": words("it test specify"), "assertion": r"\b(expect|assert|t|should|equal|deepEqual)\b",
}  # fmt: skip

SYNTAX: dict[str, Syntax] = {
    "javascript": Syntax(
        grammars=dict.fromkeys((".js", ".mjs", ".cjs", ".jsx"), ("tree_sitter_javascript", "language")),
        fence="javascript", **ECMASCRIPT,  # type: ignore[arg-type]
    ),
    "typescript": Syntax(
        grammars={
            ".ts": ("tree_sitter_typescript", "language_typescript"),
            ".mts": ("tree_sitter_typescript", "language_typescript"),
            ".tsx": ("tree_sitter_typescript", "language_tsx"),
        },
        erased=words("type_annotation type_arguments type_parameters interface_declaration type_alias_declaration "
                     "type_predicate_annotation asserts_annotation function_signature accessibility_modifier readonly "
                     "implements_clause"),
        fence="typescript", **ECMASCRIPT,  # type: ignore[arg-type]
    ),
    "go": Syntax(
        grammars={".go": ("tree_sitter_go", "language")},
        functions=words("function_declaration method_declaration"), binary=words("binary_expression"),
        numbers=words("int_literal"), strings=words("interpreted_string_literal raw_string_literal"),
        truths=words("true false"), ifs=words("if_statement"), ternaries=frozenset(), calls=words("call_expression"),
        arguments=words("argument_list"), leave=words("return_statement continue_statement break_statement"),
        simple=words("expression_statement assignment_statement inc_statement dec_statement"),
        updates=words("assignment_statement inc_statement dec_statement"), returns=frozenset(),
        parameters=words("parameter_list"), names=words("identifier"), missing='panic("to be written")',
        negation="!({})", nothing="nil",
        methods=pairs("HasPrefix/HasSuffix Index/LastIndex IndexByte/LastIndexByte ToLower/ToUpper TrimLeft/TrimRight "
                      "TrimPrefix/TrimSuffix Max/Min Floor/Ceil RLock/RUnlock Before/After Print/Println "
                      "IsUpper/IsLower IsLetter/IsDigit Split/SplitAfter FormatInt/FormatUint"),
        skipped=words("import_declaration parameter_list"), tests=words("Test"), assertion=r".", fence="go",
    ),
    "php": Syntax(
        grammars={".php": ("tree_sitter_php", "language_php")},
        functions=words("method_declaration function_definition"), binary=words("binary_expression"),
        numbers=words("integer"), strings=words("string encapsed_string"), truths=words("boolean"),
        ifs=words("if_statement"), ternaries=words("conditional_expression"),
        calls=words("function_call_expression member_call_expression scoped_call_expression "
                    "object_creation_expression"),
        arguments=words("arguments"),
        leave=words("return_statement throw_expression continue_statement break_statement"),
        simple=words("expression_statement"), updates=words("augmented_assignment_expression update_expression"),
        returns=words("return_statement"), parameters=words("formal_parameters"), names=words("variable_name"),
        missing='throw new \\LogicException("to be written");', negation="!({})", nothing="null",
        methods=pairs("strpos/strrpos stripos/strripos ltrim/rtrim min/max floor/ceil strtolower/strtoupper "
                      "array_shift/array_pop array_push/array_unshift array_keys/array_values ksort/asort current/end "
                      "str_starts_with/str_ends_with "
                      "is_string/is_int ucfirst/lcfirst array_merge/array_replace isset/empty array_map/array_filter "
                      "strstr/strrchr is_array/is_object"),
        skipped=words("attribute_list use_declaration namespace_use_declaration const_declaration"),
        tests=words("test"), assertion=r"\bassert\w*|\bexpectException\w*", fence="php",
    ),
    "ruby": Syntax(
        grammars={".rb": ("tree_sitter_ruby", "language")},
        functions=words("method singleton_method"), binary=words("binary"), numbers=words("integer"),
        strings=words("string"), truths=words("true false"), ifs=words("if unless if_modifier unless_modifier"),
        ternaries=words("conditional"), calls=words("call"), arguments=words("argument_list"),
        leave=words("return next break"), simple=words("call assignment operator_assignment"),
        updates=words("operator_assignment"), returns=words("return"), parameters=words("method_parameters"),
        names=words("identifier"), missing='raise NotImplementedError, "to be written"',
        negation="!({})", nothing="nil",
        methods=pairs("first/last min/max any?/all? push/unshift shift/pop lstrip/rstrip select/reject upcase/downcase "
                      "start_with?/end_with? floor/ceil index/rindex keys/values sub/gsub ljust/rjust take/drop "
                      "each_key/each_value to_s/inspect take_while/drop_while max_by/min_by detect/select "
                      "partition/rpartition succ/pred empty?/nil? merge/merge! map/flat_map sort/reverse"),
        skipped=words("string heredoc_body"), tests=words("it specify example test should"),
        assertion=r"\b(expect|assert\w*|refute\w*|must_\w+|should\w*|eq|eql)\b", fence="ruby",
    ),
}  # fmt: skip


def language_of(path: str) -> str | None:
    """The language of a source file by its suffix, or None."""
    suffix = "." + path.rsplit(".", 1)[-1]
    return next((name for name, syntax in SYNTAX.items() if suffix in syntax.grammars), None)
