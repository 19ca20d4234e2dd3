"""The CSS of reports and notebooks: light and dark screens, and print."""

STYLE = """
.palestra { --ink: #1b1f24; --soft: #59626d; --line: #d5dae0; --paper: #ffffff; --tint: #f4f6f8; --good: #00785a;
  --bad: #b3400a; }
@media (prefers-color-scheme: dark) { .palestra { --ink: #e4e8ec; --soft: #9aa5b1; --line: #3a424c; --paper:
  #14181d; --tint: #1d232a;
  --good: #35c69a; --bad: #ff8a4c; } }
.palestra, .palestra * { box-sizing: border-box; }
.palestra { color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
body.palestra { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; }
.palestra h1 { font-size: 1.7rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
.palestra h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem; padding-bottom: .25rem; border-bottom: 1px solid
  var(--line); }
.palestra h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
.palestra p { margin: .3rem 0 .7rem; } .palestra .soft { color: var(--soft); font-size: .9em; }
.palestra .wide { overflow-x: auto; }
.palestra table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92em; margin: .2rem 0
  1rem; }
.palestra th, .palestra td { padding: .22rem .8rem .22rem 0; text-align: right; border-bottom: 1px solid
  var(--line); }
.palestra th { color: var(--soft); font-weight: 600; }
.palestra td:first-child, .palestra th:first-child { text-align: left; }
.palestra table.words td:nth-child(2), .palestra table.words th:nth-child(2) { text-align: left; }
.palestra table.facts thead { display: none; }
.palestra table.facts td { text-align: left; overflow-wrap: anywhere; vertical-align: top; }
.palestra table.facts td:first-child { color: var(--soft); white-space: nowrap; }
.palestra .charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: 1rem 1.4rem; }
.palestra figure { margin: 0 0 .8rem; break-inside: avoid; }
.palestra figure img { width: 100%; max-width: 36rem; height: auto; display: block; }
.palestra .tiles { display: flex; flex-wrap: wrap; gap: .8rem 2.2rem; margin: 1rem 0; }
.palestra .tile b { display: block; font-size: 1.5rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.palestra .tile span { color: var(--soft); font-size: .85em; }
.palestra pre { background: var(--tint); padding: .5rem .7rem; margin: .2rem 0 .5rem; border-radius: 4px; font:
  12.5px/1.45 ui-monospace,
  monospace; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.palestra .turn { border-left: 3px solid var(--line); padding-left: .8rem; margin: .6rem 0; break-inside: avoid; }
.palestra .turn pre { max-height: 24rem; overflow: auto; } .palestra pre.said { background: none; border: 1px solid
  var(--line); }
.palestra .who { font-weight: 600; } .palestra .good { color: var(--good); } .palestra .bad { color: var(--bad); }
.palestra details { margin: .4rem 0; } .palestra summary { cursor: pointer; color: var(--soft); font-size: .9em; }
.palestra article { margin: 0 0 1.6rem; }
@media print {
  .palestra { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --tint: #f4f4f4; --good: #00613f; --bad:
    #9a3600; }
  @page { margin: 16mm 14mm; }
  body.palestra { max-width: none; padding: 0; font-size: 10.5pt; }
  .palestra h2, .palestra h3 { break-after: avoid; } .palestra tr, .palestra .tile { break-inside: avoid; }
  .palestra .charts { grid-template-columns: 1fr 1fr; } .palestra .turn pre { max-height: none; overflow: visible; }
  .palestra article { break-before: auto; } .palestra .page { break-before: page; }
  .palestra details.printed::details-content { content-visibility: visible; display: block; }
}
"""
