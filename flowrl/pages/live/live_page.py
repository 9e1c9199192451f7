"""The page: its frame, which the script fills, the list of runs and the list of commands."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.rendering.document import document
from flowrl.rendering.markup import esc, plural

POLICY = (
    "default-src 'none'; img-src 'self' data:; media-src 'self'; style-src 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)
"""What the page may load: itself."""
FOOTER = "Served by <code>flowrl watch</code> to this machine only. It reads run folders and changes nothing."
_STYLE = """
header{padding-top:26px}#said{min-height:1.5em}#said.lost{color:var(--bad)}
.runs{max-height:22rem;overflow:auto;width:100%}.runs table{width:100%}
.runs th button::after{content:none}.runs td:nth-child(2),.runs th:nth-child(2){text-align:left}
#view .scroll+.three{margin-top:16px}.runs thead th{position:sticky;top:0;background:var(--card)}
.runs tbody th{white-space:nowrap}
.runs button{font:inherit;font-weight:600;color:var(--p1);background:none;border:0;padding:4px 0;cursor:pointer;
 text-align:left;overflow-wrap:anywhere}
.runs tr.chosen{background:color-mix(in srgb,var(--p1) 12%,transparent)}
.runs tr.second{background:color-mix(in srgb,var(--p2) 14%,transparent)}
.spark{width:100px;height:24px;display:inline-block}.spark .line{stroke-width:1.6}
.chooser{display:flex;flex-wrap:wrap;gap:10px 18px;margin:14px 0 0;align-items:center}
.chooser label{display:flex;gap:8px;align-items:center;min-width:0;max-width:100%;color:var(--muted);font-size:.92rem}
select,.copy{font:inherit;font-size:.95rem;color:var(--ink);background:var(--card);border:1px solid var(--edge);
 border-radius:7px;padding:6px 9px;max-width:100%;min-width:0}
.copy{cursor:pointer;flex:none}
#jump{display:flex;flex-wrap:wrap;gap:4px 12px}#jump button{font:inherit;font-size:.92rem;color:var(--p1);
 background:none;border:0;padding:4px 0;cursor:pointer}
.slider{position:sticky;top:0;z-index:2;display:flex;gap:12px;align-items:center;background:var(--paper);
 padding:10px 0;flex-wrap:wrap}
.slider input{flex:1 1 220px;min-width:0;accent-color:var(--p1);height:28px}
.slider output{min-width:8.5rem;font-variant-numeric:tabular-nums}
.pair img,.pair video{display:block;width:100%;height:auto;border-radius:5px;min-height:40px}
.pair.strip{grid-column:1/-1}.strip .sides{flex-wrap:wrap}.strip .sides div{flex:0 1 150px}
.commands{display:grid;gap:10px;margin:0}.commands div{min-width:0}
.commands dd{display:flex;gap:8px;align-items:stretch}.commands pre{flex:1 1 auto;min-width:0;padding:8px 12px}
#log pre{max-height:20rem;overflow:auto;font-size:.82rem;white-space:pre-wrap;overflow-wrap:anywhere}
#log pre.error{border-left:4px solid var(--bad);margin-bottom:10px}
#tip{position:fixed;z-index:3;pointer-events:none;background:var(--ink);color:var(--paper);border-radius:6px;
 padding:3px 8px;font-size:.85rem;font-variant-numeric:tabular-nums;max-width:80vw}
[hidden]{display:none!important}
@media (max-width:640px){.runs table,.runs tbody,.runs tr{display:block}.runs thead{display:none}
 .runs tbody th,.runs td{display:inline-block;border:0;padding:2px 12px 2px 0;text-align:left}
 .runs tbody th{display:block}.runs tr{padding:8px 12px;border-bottom:1px solid var(--edge)}
 .runs td[data-head]::before{content:attr(data-head) " ";color:var(--muted);font-size:.82rem}
 .chooser label{flex:1 1 100%}.chooser select{flex:1 1 auto}.commands dd{flex-direction:column}
 .copy{align-self:flex-start}}
"""
HEAD = ("Run", "State", "Iterations", "Reward", "Curve", "Per iteration", "Warnings")


def page() -> str:
    """The frame of the page."""
    body = f"""<style>{_STYLE}</style>
<p id="said" class="muted" role="status">Reading the runs.</p>
<div id="list" class="card scroll runs" role="region" aria-label="Runs" tabindex="0"></div>
<div class="chooser"><label>Run <select id="one"></select></label>
<label>beside <select id="other"><option value="">no other run</option></select></label>
<nav id="jump" aria-label="Parts of the page"></nav></div>
<div id="view"></div>
<section id="samples" aria-labelledby="samples-head" hidden><h2 id="samples-head">Samples</h2>
<p class="lead" id="samples-lead"></p>
<div class="slider"><label for="when">Iteration</label><input id="when" type="range" min="0" max="0" step="1" value="0">
<output id="when-said" for="when"></output><select id="which" aria-label="Prompt"></select></div>
<div id="shown" class="pairs"></div></section>
<section id="log" aria-labelledby="log-head" hidden><h2 id="log-head">Log</h2>
<p class="lead">Rows of the metrics file as they are written, the newest last.</p>
<pre class="error" id="error" tabindex="0" hidden></pre><pre id="lines" tabindex="0"></pre></section>
<section id="commands" aria-labelledby="commands-head" hidden><h2 id="commands-head">Commands</h2>
<p class="lead">To be copied into a terminal; this page starts and stops nothing.</p>
<div id="command-list"></div></section>
<div id="tip" hidden></div><script src="page.js" defer></script>"""
    return document("flowrl watch", body, footer=FOOTER, policy=POLICY)


def list_of(rows: Sequence[str]) -> str:
    """The table of runs; rows are HTML."""
    if not rows:
        return (
            '<p class="muted">There is no run yet. It appears here when <code>flowrl train</code> has made its '
            "folder.</p>"
        )
    head = "".join(f'<th scope="col">{esc(text)}</th>' for text in HEAD)
    counted = plural(len(rows), "run")
    return f"<table><caption>{counted}</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def command_list(commands: Sequence[tuple[str, str]]) -> str:
    """Commands with what they do, each with a button that copies it."""
    items = "".join(
        f'<div><dt>{esc(words)}</dt><dd><pre tabindex="0"><code>{esc(command)}</code></pre>'
        '<button type="button" class="copy">Copy</button></dd></div>'
        for words, command in commands
    )
    return f'<dl class="commands">{items}</dl>'
