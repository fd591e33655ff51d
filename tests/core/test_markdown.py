"""Names of strangers show letter by letter in Markdown, wherever a report or a card puts them."""

import re

import pytest
from draftsmith.core.markdown import block, cell, code, label, plain, sentence
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TEXT = {"inline", "text", "text_special", "paragraph_open", "paragraph_close", "heading_open", "heading_close"}
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!-- gone -->", "[here](https://evil.example)",
    "![p](https://evil.example/p.png)", "[a][b]", "[a]: https://evil.example", "`code`", "``a`b``", "a | b", "\\|",
    "\\", "**bold**", "*it*", "__b__", "_i_", "~~gone~~", "a\nb", "a\n\n# b", "# a", "> a", "- a", "1. a", "---", "===",
    "&lt;", "$x$ and $y$", "<https://evil.example>", "```\na\n```", "a\r\nb", "\u2028a", "MT*", "max_new_tokens",
    "2.0 [1.9, 2.1]", "***", "a*b*c", "_", "a_b_", "\\*a\\*", "x**y**z", "[x](y) [1, 2]", "<b", "a < b > c", "~a~",
]  # fmt: skip


def flat(text):
    return " ".join(text.split())


def text_of(tokens):
    """What a reader sees, and the kinds of what stands around it."""
    kinds, seen = set(), []
    for token in tokens:
        kinds.add(token.type)
        if token.children:
            inner, text = text_of(token.children)
            kinds |= inner
            seen.append(text)
        elif token.type in ("text", "code_inline", "text_special"):
            seen.append(token.content)
        elif token.type in ("fence", "code_block", "html_block", "html_inline"):
            seen.append(f"<{token.type}>")
    return kinds, "".join(seen)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_text_wherever_it_stands(name):
    bare = name.replace("`", "").replace("*", "")  # of a sentence these are marks
    for page, shown in ((plain(f"a {name} b"), name), (f"# a {plain(name)} b", name), (sentence(f"x {bare}"), bare)):
        kinds, text = text_of(READER.parse(page))
        assert kinds <= TEXT and flat(shown) in flat(text), page
    assert READER.render(f"![{label(name)}](a.png)").count('src="a.png"') == 1
    row = f"| a | b |\n| --- | --- |\n| {cell(name)} | {cell(code(name))} |\n"
    rendered = READER.render(row)
    assert rendered.count("<td>") == 2 and rendered.count("<code>") == 1, "neither more cells nor fewer"
    assert not re.search(r"<(?!/?(?:table|thead|tbody|tr|th|td|code)\b)", rendered), rendered


@settings(deadline=None, max_examples=300, derandomize=True, database=None)
@given(st.text("ab1 *_`[]()<>|\\~$&;#!-.:/\n", max_size=24))
def test_whatever_the_letters(name):
    for page in (f"a {plain(name)} b", f"x {sentence(name.replace('`', '').replace('*', ''))}"):
        kinds, _ = text_of(READER.parse(page))
        assert not kinds & {"html_inline", "html_block", "link_open", "image", "code_inline", "fence", "s_open"}, page
        assert not kinds & {"heading_open", "hr", "bullet_list_open", "ordered_list_open", "blockquote_open"}, page
    page = f"| a | b |\n| --- | --- |\n| {cell(name)} | c |\n"
    assert READER.render(page).count("<td>") == 2 and "<td>c</td>" in READER.render(page), page


@settings(deadline=None, max_examples=200, derandomize=True, database=None)
@given(st.text("a1 *_#>-+=.)~", max_size=12))
def test_a_sentence_begins_no_block(text):
    kinds, _ = text_of(READER.parse(f"- {sentence(text)}\n- b\n"))
    assert not kinds & {"heading_open", "hr", "ordered_list_open", "blockquote_open", "fence", "code_block"}, text
    tokens = READER.parse(f"- {sentence(text)}\n- b\n")
    assert sum(token.type == "bullet_list_open" for token in tokens) == 1


@pytest.mark.parametrize(
    "text", ["MT*", "max_new_tokens", "2.0 [1.9, 2.1]", "a < b", "3 * 4", "/data/my_x/*.jsonl", "~/x", "-"]
)
def test_what_needs_no_escape_has_none(text):
    assert plain(text) == text


def test_marks_of_a_sentence_stay():
    assert sentence("**Slower** in `a_b`: <b>x</b>") == "**Slower** in `a_b`: \\<b>x\\</b>"
    assert sentence("**a <b> c**") == "**a \\<b> c**" and sentence("a ** b") == "a ** b"
    assert block("a\n```\nb", "python") == "````python\na\n```\nb\n````"
