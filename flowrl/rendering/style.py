"""The style sheet. Palette: Okabe and Ito's colours, told apart with any colour vision; lighter ones on a dark page."""

from __future__ import annotations

LIGHT = """
--ink:#1a222c;--muted:#566170;--paper:#f5f6f8;--card:#fff;--edge:#dde2e8;--grid:#e6e9ee;--code:#f0f2f5;
--good:#00674a;--bad:#a33c00;--on1:#fff;--on5:#111;
--p1:#0072b2;--p2:#d55e00;--p3:#009e73;--p4:#e69f00;--p5:#56b4e9;--p6:#cc79a7;
"""
DARK = """
--ink:#e8ecf1;--muted:#a3aebb;--paper:#12161b;--card:#1b2128;--edge:#303943;--grid:#2b333c;--code:#151a20;
--good:#4fd1a5;--bad:#ff9d5c;--on1:#111;--on5:#fff;
--p1:#56b4e9;--p2:#f28c38;--p3:#2bc79a;--p4:#f0c14b;--p5:#2f7fc1;--p6:#dd9cc0;
"""
CSS = (
    f":root{{color-scheme:light dark;{LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
 sans-serif;
 -webkit-text-size-adjust:100%}
header,main,footer{max-width:1180px;margin:0 auto;padding:0 20px}
header{padding-top:36px}
h1{font-size:clamp(1.6rem,4vw,2.2rem);line-height:1.15;margin:0 0 8px;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:44px 0 6px}
h3{font-size:1rem;margin:0 0 6px;display:flex;flex-wrap:wrap;gap:4px 10px;justify-content:space-between;
 align-items:baseline}
a{color:var(--p1)}
header p,.muted,.lead,footer{color:var(--muted)}
header p{margin:0;overflow-wrap:anywhere}
.lead{margin:0 0 14px;max-width:46rem}
.summary{font-size:1.16rem;line-height:1.5;max-width:54rem;margin:22px 0 6px}
.muted{font-size:.9rem;margin:0;max-width:54rem}
.notes{margin:14px 0 0;padding:10px 14px 10px 32px;border:1px solid var(--edge);border-left:4px solid var(--p4);
 border-radius:6px;background:var(--card);font-size:.92rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;margin:24px 0 0}
.tiles div,.card{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:14px 16px;margin:0}
dt{font-size:.85rem;color:var(--muted)}
dd{margin:2px 0 0}
dd b{display:block;font-size:1.7rem;line-height:1.25;font-variant-numeric:tabular-nums}
dd small{color:var(--muted);font-size:.84rem}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr));gap:16px;align-items:start;
 margin-top:12px}
.two>*{min-width:0}.two .scroll{margin:0;width:auto}.two table{width:100%}
.three{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,330px),1fr));gap:16px}
.narrow{display:none}
svg{display:block;width:100%;height:auto;overflow:visible;font:12px system-ui,-apple-system,"Segoe UI",Roboto,
 sans-serif}
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--muted);fill:none}
text{fill:var(--ink)}.tick,.label{fill:var(--muted);font-variant-numeric:tabular-nums}
.name{font-size:13px}.mid{text-anchor:middle}.end{text-anchor:end}
.c0{--c:var(--muted)}.c1{--c:var(--p1)}.c2{--c:var(--p2)}.c3{--c:var(--p3)}.c4{--c:var(--p4)}.c5{--c:var(--p5)}
 .c6{--c:var(--p6)}
.line,.whisker{stroke:var(--c);fill:none;stroke-width:2.2;stroke-linejoin:round}.whisker{stroke-width:1.6}
.dashed{stroke-dasharray:6 4}.band{fill:var(--c);opacity:.18;stroke:none}
.raw{fill:var(--c);opacity:.38}.dot{fill:var(--c);stroke:var(--card);stroke-width:1}
.ring{fill:var(--card);stroke:var(--c);stroke-width:2}.change{stroke:var(--muted);stroke-width:1;opacity:.6;
 stroke-dasharray:2 3}
.fill{fill:var(--c)}.share{font-size:13px;font-weight:600;text-anchor:middle;fill:#111}
.share.c1{fill:var(--on1)}.share.c5{fill:var(--on5)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:10px 0 0;padding:0;font-size:.85rem;
 color:var(--muted)}
.legend li{display:flex;align-items:center;gap:7px}
.key{display:inline-block;width:20px;height:0;border-top:3px solid var(--c);flex:none}
i.key.dash{border-top-style:dashed;opacity:1}
i.key.band{height:12px;border:0;background:var(--c);opacity:.25}
i.key.dot,i.key.ring,i.key.raw,i.key.box{width:11px;height:11px;border:2px solid var(--c);border-radius:50%;
 background:var(--c)}
i.key.ring{background:none}i.key.raw{width:8px;height:8px;opacity:.5}i.key.box{border-radius:3px}
.scroll{overflow-x:auto;width:fit-content;max-width:100%;margin-top:14px;border:1px solid var(--edge);
 border-radius:10px;background:var(--card)}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{padding:8px 14px;text-align:right;border-top:1px solid var(--edge);white-space:nowrap}
thead th{border-top:0;color:var(--muted);font-weight:600}
th button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer}
th button::after{content:"\\2195";margin-left:5px;opacity:.45}
[aria-sort] button::after{content:"\\2193";opacity:1}[aria-sort=ascending] button::after{content:"\\2191"}
th:first-child{text-align:left}tbody th{font-weight:500}
details td,thead th:first-child{text-align:left}details td{white-space:normal;overflow-wrap:anywhere}
 details .scroll{width:auto}details th{text-align:left;vertical-align:top}
.mark{font-size:.82rem;font-weight:600;white-space:nowrap;color:var(--muted)}
.mark.good{color:var(--good)}.mark.bad{color:var(--bad)}
.value{font-size:1.5rem;font-weight:600;margin:0 0 4px;font-variant-numeric:tabular-nums}
td small{display:block;color:var(--muted);font-size:.82rem}
figcaption{font-size:.88rem;color:var(--muted);margin-top:8px}figcaption b{color:var(--ink)}
.pairs{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,270px),1fr));gap:16px}
.pair{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:10px}
.sides{display:flex;gap:8px}.sides div{flex:var(--share,1) 1 0;max-width:100%}
.sides img{display:block;width:100%;height:auto;border-radius:5px}.pixels{image-rendering:pixelated}
.sides span{font-size:.8rem;color:var(--muted)}
.pair figcaption{margin-top:4px;color:var(--ink);overflow-wrap:anywhere}.pair small{display:inline;white-space:nowrap}
.pairs.edits{grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
.pairs.clips{grid-template-columns:minmax(0,1fr)}.shot{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,4.6fr);
 gap:2px 10px;align-items:center;margin-bottom:8px}
.shot span{grid-column:1/-1;font-size:.8rem;color:var(--muted)}.shot img,.shot video{display:block;width:100%;
 height:auto;border-radius:5px}.clips .sides{margin-bottom:8px}.clips .sides div{flex:0 0 17.5%}
.one{margin-top:12px;max-width:760px}
.tables h3{margin-top:26px}.tables .muted{margin-top:8px}
.thin{stroke-width:1.4;opacity:.75}.faint{opacity:.4}.line.c0{stroke-width:1.4;opacity:.55}.dot.c0{opacity:.7}
.shots td,.shots th{padding:5px;text-align:left;white-space:normal;font-size:.85rem}.shots th{max-width:10rem}
.shots tbody th{min-width:7rem}.shots img{display:block;width:104px;max-width:none;height:auto;border-radius:4px}
.fails{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:12px;margin:4px 0 22px}
.fails figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:8px}
.fails img{display:block;width:100%;height:auto;border-radius:5px}.fails figcaption{overflow-wrap:anywhere}
.facts{max-width:54rem;font-size:.92rem}.facts dt{margin-top:8px}.facts dd{overflow-wrap:anywhere}
.verdicts{display:grid;grid-template-columns:max-content max-content 1fr;gap:0;margin:22px 0 0;padding:0 16px}
.verdicts>*{padding:9px 14px 9px 0;border-top:1px solid var(--edge);margin:0}
.verdicts>:nth-child(-n+3){border-top:0}.verdicts b{font-weight:600}.mark.fair{color:var(--ink)}
.numbers .scroll{width:auto}.numbers table{width:100%}
.gallery{display:grid;gap:16px}.gallery .sides{flex-wrap:wrap}.gallery .sides div{flex:0 0 112px}
pre{background:var(--code);border:1px solid var(--edge);border-radius:8px;padding:12px 14px;overflow-x:auto;
 font-size:.86rem;margin:0}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
details{margin-top:12px}summary{cursor:pointer;font-weight:600;padding:6px 0}
:focus-visible{outline:3px solid var(--p1);outline-offset:2px}
footer{padding:40px 20px;font-size:.85rem}
@media (max-width:640px){header,main,footer{padding-left:14px;padding-right:14px}header{padding-top:22px}
 .wide{display:none}.narrow{display:block}.card{padding:12px}
 th,td{padding:7px 6px}tbody th{white-space:normal}
 td small{font-size:.76rem;white-space:normal}pre{white-space:pre-wrap;
 overflow-wrap:anywhere}
 .shot{grid-template-columns:minmax(0,1fr)}
 .clips .sides div{flex-basis:50%}
 .verdicts{grid-template-columns:1fr max-content}.verdicts p{grid-column:1/-1;border-top:0;padding-top:0}
 .verdicts>:nth-child(3n+1),.verdicts>:nth-child(3n+2){border-top:1px solid var(--edge)}
 .gallery .sides div{flex-basis:84px}
 .tiles{grid-template-columns:1fr 1fr}.tiles div{padding:10px 12px}dd b{font-size:1.3rem}h2{margin-top:34px}}
@media print{body{background:#fff;font-size:11pt}.shot{display:block}.shot video{display:none}
 .card,.pair,.tiles div,tr,pre{break-inside:avoid}
 h2{break-after:avoid}
 details::details-content{content-visibility:visible;height:auto}pre{white-space:pre-wrap}.scroll{overflow:visible}}
"""
)
