"""Parts of HTML pages: document, markup, style, charts. It knows nothing of runs; every page is made of it."""
