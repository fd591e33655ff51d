"""A page of Markdown as one HTML file: pictures inside, tables that sort, nothing fetched from elsewhere.

markdown-it makes its tags and escapes every text: names come from recipes and reports, which may be a stranger's.
`page.html.jinja` has the frame, style and script.
"""

from __future__ import annotations

import base64
import re
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..core.markdown import filled


def html_page(markdown: str, folder: Path) -> str:
    """The whole document.

    Args:
        markdown: of a page that begins with its title, as it is to be read: secrets are taken out before, so that none
            is looked for in a picture's data.
        folder: where the PNG files lie that it shows.
    """
    from markdown_it import MarkdownIt  # nothing but a page needs it

    def image(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
        caption = escape(renderer.renderInlineAsText(tokens[index].children, options, env))
        path = folder / unquote(str(tokens[index].attrs["src"]))
        if not path.is_file():
            return caption
        return f'<img src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" alt="{caption}">'

    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    reader.disable(["link", "autolink"])
    reader.add_render_rule("image", image)
    reader.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
    reader.add_render_rule("table_close", lambda *_: "</table></div>\n")
    # The one tag that our tables have: the second best value of a column.
    body = re.sub(r"&lt;u&gt;([^<&]*)&lt;/u&gt;", r"<u>\1</u>", reader.render(markdown))
    heading = re.match(r"<h1>(.*?)</h1>", body)
    title = "" if heading is None else re.sub(r"<.*?>", "", heading[1])  # escaped, as the body is
    return filled(Path(__file__).parent / "page.html.jinja", title=title, body=body)
