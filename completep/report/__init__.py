"""Presentation: the only place that knows how anything looks, in a terminal, in a notebook, on a page or in Markdown.

In: a `Document`, which any result makes of itself. Out: text, HTML, Markdown, pictures, files. It imports no model and
no study; those import it. That is why it comes early in the import order.

    document.py   what a result says, as data: verdict, text, table, facts, figure
    escape.py     text from outside, made harmless: the only place that escapes
    charts.py     what figures are made of: colours, axes, common panels; a figure as the bytes of a file
    terminal.py   document → rich text that fits the console
    html.py       document → page (page.html, page.js) or notebook fragment (fragment.html)
    markdown.py   document → Markdown
    result.py     `Result`, the base class of what public functions return
    files.py      document → a folder with all of these
"""
