"""The report's style sheet: colours for light and dark, and the classes that the figures use."""

CSS = """
:root{color-scheme:light dark;--bg:#f6f7f9;--panel:#fff;--ink:#191d24;--muted:#5b6472;--line:#dfe3e8;--grid:#e9ecf0;
--run:#1f5fbf;--ref:#f2c46d;--fault:#c4302b;--ok:#12805c;--cold:#c8600a;--restore:#2f6fd0;--other:#8250c4;
--band:#f1f4f8;--hidden:#a9c8ef;--exposed:#d5650c;--generate:#5b8def;--exec:#2a9d8f;--life:#e6eaf0;--absent:#e3d3d2}
@media(prefers-color-scheme:dark){:root{--bg:#11141a;--panel:#191d25;--ink:#e8ebf0;--muted:#9aa5b4;--line:#2d3440;
--grid:#262c36;--run:#7db0ff;--ref:#7a5a1c;--fault:#ff7169;--ok:#3ecf9b;--cold:#ff9d4d;--restore:#74a9ff;--other:#bd9bf5;
--band:#1f242d;--hidden:#36557f;--exposed:#ff9147;--generate:#4a78d0;--exec:#2a9d8f;--life:#2a303b;--absent:#4a3433}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue","DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1060px;margin:0 auto;padding:28px 20px 60px}
header h1{font-size:22px;margin:0;letter-spacing:-.01em}
header p{margin:2px 0 0;color:var(--muted);font-size:13.5px;overflow-wrap:anywhere}
.verdict{margin:18px 0;padding:12px 16px;border-radius:8px;background:var(--panel);border:1px solid var(--line);
border-left:5px solid var(--ok);font-size:16px}
.verdict.bad{border-left-color:var(--fault)}.verdict.open{border-left-color:var(--ref)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(226px,1fr));gap:12px;margin:0 0 22px;padding:0}
.card{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.card dt{color:var(--muted);font-size:13px}.card dd{margin:0}
.card .big{font-size:24px;font-weight:650;letter-spacing:-.015em;line-height:1.3}
.card .small{color:var(--muted);font-size:13px;line-height:1.4}
.card.bad .big{color:var(--fault)}
section{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:16px 18px 14px;margin:0 0 18px}
h2{font-size:17px;margin:0 0 4px;letter-spacing:-.005em}
.reading{margin:0 0 10px;color:var(--muted);font-size:13.5px;max-width:86ch}
.answer{margin:2px 0 4px;font-size:15px;font-weight:600}
.data{margin:8px 0 0;font-size:12.5px;color:var(--muted)}.data a{color:var(--run)}
.missing{margin:6px 0 2px;color:var(--muted)}
.scroll{overflow-x:auto}
svg{display:block;width:100%;min-width:700px;height:auto}
.legend{margin:0 0 8px;font-size:13px;color:var(--muted);display:flex;flex-wrap:wrap;gap:4px 16px}
.legend span{display:inline-flex;align-items:center;gap:6px}
.swatch{display:inline-block;width:16px;height:10px;border-radius:2px;background:var(--muted)}
.swatch.run{height:3px;background:var(--run)}.swatch.reference{background:var(--ref)}
.swatch.hidden{background:var(--hidden)}.swatch.exposed{background:var(--exposed)}
.swatch.generate{background:var(--generate)}.swatch.exec{background:var(--exec)}
.swatch.standing-by{background:var(--ok);height:5px}
.swatch.how-promotion,.swatch.how-cold,.swatch.how-restore,.swatch.how-other{width:10px;border-radius:50%}
.swatch.how-promotion{background:var(--ok)}.swatch.how-cold{background:var(--cold)}
.swatch.how-restore{background:var(--restore)}.swatch.how-other{background:var(--other)}
.swatch.fault{background:none;width:auto;height:auto}
.swatch.fault::before{content:"\\00d7";color:var(--fault);font:700 18px/10px sans-serif}
svg text{font-size:12px;fill:var(--ink);font-family:inherit}
text.tick{fill:var(--muted);font-size:11.5px}text.lane{font-weight:600;font-size:13px}text.value{font-weight:650;font-size:14px}
.grid{stroke:var(--grid)}.axis{stroke:var(--muted);stroke-width:1}.band{fill:var(--band)}
.resume{stroke:var(--muted);stroke-dasharray:4 3}
.run{fill:none;stroke:var(--run);stroke-width:1.8;stroke-linejoin:round}.run-dot{fill:var(--run)}
.reference{fill:none;stroke:var(--ref);stroke-width:9;stroke-linejoin:round;stroke-linecap:round}
.fault{stroke:var(--fault);stroke-width:2.2;fill:none;stroke-linecap:round}
.stem{stroke-width:1.2;stroke-opacity:.55}.dot{stroke:var(--panel);stroke-width:1}
.how-promotion{fill:var(--ok);stroke:var(--ok)}.how-cold{fill:var(--cold);stroke:var(--cold)}
.how-restore{fill:var(--restore);stroke:var(--restore)}.how-other{fill:var(--other);stroke:var(--other)}
.dot.how-promotion,.dot.how-cold,.dot.how-restore,.dot.how-other{stroke:var(--panel)}
.standing-by{fill:var(--ok)}.no-standby{fill:var(--absent)}
.hidden{fill:var(--hidden)}.exposed{fill:var(--exposed)}
.life{fill:var(--life)}.generate{fill:var(--generate)}.exec{fill:var(--exec)}
.fall{stroke:none}.whisker{stroke-width:1.6;stroke-opacity:.6}
.mend{fill-opacity:.25;stroke-width:1.6}.outage{fill-opacity:.32;stroke-opacity:.8;stroke-width:1}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{color:var(--muted);font-weight:600}th.word,td.word{text-align:left}
tr.total td{font-weight:650}tr.group td{border-bottom:0;padding-top:12px;font-weight:650;text-align:left}
tr.first>*{border-top:1px solid var(--line)}
footer{color:var(--muted);font-size:13px}footer p{margin:4px 0}
code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.93em;overflow-wrap:anywhere}
@media print{body{background:#fff}section,.card,.verdict{break-inside:avoid}}
"""
