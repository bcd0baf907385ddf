//! The HTML page of `--report`: a single file that loads nothing else, for light and dark mode, as wide as its window.

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// Plots are drawn for a light page. On a dark page they are inverted, and keep their hues.
const STYLE: &str = "\
:root{color-scheme:light dark}\
body{font-family:system-ui,sans-serif;line-height:1.4;max-width:60em;margin:0 auto;padding:1em}\
h1{font-size:1.4em}h2{font-size:1.1em}\
.wide{overflow-x:auto}\
table{border-collapse:collapse}\
td,th{padding:.1em 1em .1em 0;text-align:left;vertical-align:top;overflow-wrap:anywhere}\
td:first-child{white-space:nowrap;overflow-wrap:normal}\
.bars{width:100%}\
td.bar{min-width:8em;width:40%}\
.number{white-space:nowrap}\
.scale{position:relative;height:.9em;margin:.25em 0}\
.value{background:#3b76c4;height:100%}.above{background:#2f8f57}\
.roof{position:absolute;top:-.2em;bottom:-.2em;border-left:2px solid;margin-left:-2px}\
svg{display:block;width:100%;min-width:36em;height:auto}\
.plots{display:flex;flex-wrap:wrap;gap:.5em}\
.plots div{flex:1 1 20em;max-width:30em}.plots svg{min-width:0}\
@media (prefers-color-scheme:dark){svg{filter:invert(.92) hue-rotate(180deg)}}\
@media (max-width:40em){td,th{padding-right:.5em;font-size:.85em}\
.bars tr{display:flex;flex-wrap:wrap}.bars .bar{flex:0 0 100%;padding:0 0 .4em}}";

/// A page with this title and body.
pub fn page(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                (body)
            }
        }
    };
    page.into_string()
}
