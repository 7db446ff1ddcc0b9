"""The report page's look: one style sheet for screen (light and dark), print and small windows.

Colours are Okabe and Ito's set ("Color Universal Design", 2008), told apart with any common colour
blindness and in grey; a stage also carries its letter, a wait its hatching, a verdict its word.
"""

from __future__ import annotations

from typing import Final

_LIGHT: Final = """
--page:#f6f6f4; --card:#ffffff; --ink:#1c1f24; --soft:#555d68; --line:#dcdee2; --grid:#eceef0;
--a:#e69f00; --b:#0072b2; --c:#009e73; --link:#8c93a0; --hatch:#9aa1ac; --mark:#d55e00;
--on-a:#1c1f24; --on-b:#ffffff; --on-c:#ffffff; --band:#0072b233;
--pass:#00664a; --pass-bg:#e0f2ec; --fail:#a33b00; --fail-bg:#fbe6db;
--open:#6a5200; --open-bg:#fbf1d3; color-scheme:light;
"""

_DARK: Final = """
--page:#15171b; --card:#1e2126; --ink:#e9ebee; --soft:#a4abb6; --line:#343941; --grid:#2a2e35;
--a:#f0b23c; --b:#56b4e9; --c:#2fc59b; --link:#8791a0; --hatch:#6d7683; --mark:#ff8a3d;
--on-a:#15171b; --on-b:#15171b; --on-c:#15171b; --band:#56b4e940;
--pass:#7fe0c2; --pass-bg:#15372d; --fail:#ffb088; --fail-bg:#47230f;
--open:#f2d27a; --open-bg:#3d3312; color-scheme:dark;
"""

_SHEET: Final = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1,h2,h3,p,ul,table{margin:0}
header{border-left:10px solid var(--tone);background:var(--tone-bg);border-radius:10px;
 padding:20px 26px;margin-bottom:18px}
header.PASS{--tone:var(--pass);--tone-bg:var(--pass-bg)}
header.FAIL{--tone:var(--fail);--tone-bg:var(--fail-bg)}
header.INCONCLUSIVE{--tone:var(--open);--tone-bg:var(--open-bg)}
h1{font-size:30px;letter-spacing:.02em;color:var(--tone);line-height:1.2}
h1 small{font-size:15px;font-weight:500;letter-spacing:0;margin-left:10px}
header p{color:var(--soft);margin-top:2px;overflow-wrap:anywhere}
header ul{margin-top:12px;padding-left:20px;font-size:16.5px}
header li:first-child{font-weight:650}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;
 margin-bottom:18px}
.figure,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.figure{padding:12px 16px}
.figure b{display:block;font-size:23px;font-weight:650;line-height:1.25;white-space:nowrap}
.figure span{color:var(--soft);font-size:13px}
.cards{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:18px}
section{padding:16px 20px 18px;min-width:0;overflow-x:auto}
section.wide{grid-column:1/-1}
h2{font-size:17px;margin-bottom:2px}
section>p{color:var(--soft);font-size:14px;margin-bottom:10px}
section>p.after{margin:10px 0 0}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--ink);font-size:12.5px;font-family:inherit}
svg .tick{fill:var(--soft);font-size:11.5px}
svg .row{font-weight:600}
svg .in-a{fill:var(--on-a)} svg .in-b{fill:var(--on-b)} svg .in-c{fill:var(--on-c)}
svg .in-a,svg .in-b,svg .in-c{font-size:11.5px;font-weight:600}
svg .note{fill:var(--soft);font-size:11.5px}
svg .axis{stroke:var(--soft);stroke-width:1}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .back{fill:var(--grid)}
svg .a{fill:var(--a)} svg .b{fill:var(--b)} svg .c{fill:var(--c)} svg .link{fill:var(--link)}
svg .wait{fill:url(#hatch)} svg .band{fill:var(--band)}
svg .gpu{fill:var(--mark)}
svg path.hops{fill:none;stroke:var(--link);stroke-width:1;opacity:.55}
svg path.hop{fill:none;stroke:var(--mark);stroke-width:2.2}
svg path.step,svg path.curve{fill:none;stroke:var(--b);stroke-width:2}
svg path.step2,svg path.curve2{fill:none;stroke:var(--mark);stroke-width:2;stroke-dasharray:6 3}
svg path.curve3{fill:none;stroke:var(--c);stroke-width:2;stroke-dasharray:2 2.5}
svg .bound{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
svg .ref{stroke:var(--mark);stroke-width:1.8}
svg .ref2{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:5 3}
svg circle.top{fill:none;stroke:var(--mark);stroke-width:1.2}
svg circle.b{stroke:var(--card);stroke-width:1.5} svg circle.here{fill:var(--mark)}
svg .hatching{stroke:var(--hatch);stroke-width:2}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th{text-align:left;color:var(--soft);font-weight:500;font-size:13px}
th,td{padding:4px 12px 4px 0;border-bottom:1px solid var(--grid);vertical-align:top}
td.n,th.n{text-align:right}
tr:last-child td{border-bottom:0}
td.bad{color:var(--fail);font-weight:650} td.good{color:var(--pass)}
tr.here td{font-weight:650}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--soft);margin:8px 0 0}
.key svg{width:26px;height:13px;display:inline-block;vertical-align:-2px;margin-right:5px}
footer{color:var(--soft);font-size:13px;margin-top:18px;overflow-wrap:anywhere}
a{color:inherit}
nav table{background:var(--card);border:1px solid var(--line);border-radius:10px;margin-bottom:26px}
nav td,nav th{padding:8px 14px}
article+article{margin-top:56px;border-top:3px double var(--line);padding-top:32px}
@media screen and (max-width:820px){.scroll{overflow-x:auto} .scroll>svg{min-width:760px}
 .cards{grid-template-columns:minmax(0,1fr)}}
@media print{
 @page{margin:12mm}
 body{font-size:12px}
 main{max-width:none;padding:0}
 .cards{display:block}
 section{margin-bottom:14px;overflow:visible}
 section:not(.wide) svg[role]{max-width:530px}
 .wide svg .row{font-size:14.5px}
 .wide svg .tick,.wide svg .in-a,.wide svg .in-b,.wide svg .in-c{font-size:13px}
 header,.figure,section{break-inside:avoid}
 article+article{break-before:page;margin-top:0;border-top:0}
 header,svg *{-webkit-print-color-adjust:exact;print-color-adjust:exact}
}
"""

STYLE: Final = (
    f":root{{{_LIGHT}}}\n"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}\n{_SHEET}"
)
