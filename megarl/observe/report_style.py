"""Style of the report: light or dark as the reader's system says. Colours of lines and layers are told apart in both."""

_LIGHT = (
    "#2563c9",
    "#d9480f",
    "#2b8a3e",
    "#9c36b5",
    "#b08900",
    "#0b7285",
    "#c2255c",
    "#5c6b7a",
    "#74b816",
    "#7950f2",
    "#e8590c",
    "#495057",
)
_DARK = (
    "#74a9ff",
    "#ff922b",
    "#69db7c",
    "#da77f2",
    "#ffd43b",
    "#3bc9db",
    "#f783ac",
    "#adb5bd",
    "#a9e34b",
    "#9775fa",
    "#ffa94d",
    "#ced4da",
)


def _colours(palette: tuple[str, ...]) -> str:
    return "".join(f"--c{i}:{colour};" for i, colour in enumerate(palette))


STYLE = (
    ":root{color-scheme:light dark;--back:#fff;--card:#f6f7f9;--text:#1b1f24;--soft:#57606a;--rule:#d5d9de;--bad:#c92a2a;"
    + _colours(_LIGHT)
    + "}@media(prefers-color-scheme:dark){:root{--back:#14171b;--card:#1d2127;--text:#e6e9ec;--soft:#a3acb5;--rule:#3a4149;--bad:#ff8787;"
    + _colours(_DARK)
    + "}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:1.7rem;margin:.2em 0 .6em}h2{font-size:1.2rem;margin:2em 0 .6em}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:0}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 16px}
.tiles dt{color:var(--soft);font-size:.82rem}.tiles dd{margin:0;font-size:1.3rem;font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px}
figcaption{font-weight:600;margin-bottom:4px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:12px}
.grid{stroke:var(--rule);stroke-width:1}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:6px 0 0;padding:0;font-size:.85rem}
.swatch{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.empty{color:var(--soft)}
table{border-collapse:collapse;width:100%;margin-top:12px;font-size:.9rem}
th,td{text-align:left;vertical-align:top;padding:5px 10px;border-bottom:1px solid var(--rule)}
th.number{text-align:right}thead th{color:var(--soft);font-weight:600}tbody th{font-weight:400}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.failed{color:var(--bad)}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.45 ui-monospace,monospace}
pre.block{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px;margin-top:8px}
summary{cursor:pointer;padding:4px 0}
"""
    + "".join(
        f".line.c{i}{{stroke:var(--c{i})}}.dot.c{i},polygon.c{i}{{fill:var(--c{i})}}.swatch.c{i}{{background:var(--c{i})}}\n"
        for i in range(len(_LIGHT))
    )
)
