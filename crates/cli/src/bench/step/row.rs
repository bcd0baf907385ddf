//! The measurements of a step, and their table.

use std::borrow::Cow;

use comfy_table::Table;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::load::Weight;
use super::case::{Case, Phase};
use crate::options::ClusterChoice;

/// A step of a case.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// The cache and its load.
    pub case: Case,
    /// What was measured, or why nothing was.
    pub measured: Result<Measured, String>,
}

/// What was measured of a step.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Measured {
    /// Where the requests are in their windows.
    pub phase: Phase,
    /// Updates with appends, indexer, lists and gathers of all layers: one graph.
    pub step: Timed,
    /// The same with the routers.
    pub routed: Timed,
    /// Updates and appends of all layers: one graph.
    pub updates: Timed,
    /// The step with attention in place of the gathers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attended: Option<Timed>,
    /// The step's launches by kind. Without the router they add up to a step that does not overlap.
    pub kinds: Vec<Kind>,
    /// The host's time for the same step, launch by launch.
    pub host: Hosts,
}

/// A graph.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Timed {
    /// Its nodes.
    pub nodes: u64,
    /// Median microseconds of a replay.
    pub microseconds: f64,
}

/// The launches of one kind in all layers.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Kind {
    /// The kind.
    pub name: Cow<'static, str>,
    /// Its graph.
    #[serde(flatten)]
    pub timed: Timed,
}

/// What the host does in an eager step. It waits for nothing.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Hosts {
    /// With the driver.
    pub device: Host,
    /// The library's own: on a device that does nothing.
    pub own: Host,
}

/// The host's time for an eager step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Median microseconds of `begin_step`.
    pub begin_microseconds: f64,
    /// Median microseconds of queueing the launches of all layers, as many as the step's graph has nodes.
    pub microseconds: f64,
}

/// The times of the kinds. Two of them are differences: see the documentation of the parent module.
pub fn alone(measured: &[Kind]) -> Vec<Kind> {
    const SELECT: &str = "select";
    const PROJECTED: &str = "select projected";
    const QUERY: &str = "index query";
    let of = |name| {
        let found = measured.iter().find(|kind| kind.name == name);
        found.map_or(Timed { nodes: 0, microseconds: 0.0 }, |kind| kind.timed)
    };
    let (select, projected, query) = (of(SELECT), of(PROJECTED), of(QUERY));
    let lists = Timed {
        nodes: projected.nodes.saturating_sub(query.nodes),
        microseconds: projected.microseconds - query.microseconds,
    };
    let queries = Timed {
        nodes: select.nodes.saturating_sub(lists.nodes),
        microseconds: select.microseconds - lists.microseconds,
    };
    let kept = measured.iter().filter(|kind| ![SELECT, PROJECTED, QUERY].contains(&&*kind.name));
    let differences = [("queries", queries), ("scores + lists", lists)];
    let differences = differences.map(|(name, timed)| Kind { name: name.into(), timed });
    kept.cloned().chain(differences).collect()
}

/// The kinds in the order of the table.
const KINDS: [&str; 9] = [
    "csa update",
    "hca update",
    "swa append",
    "queries",
    "scores + lists",
    "windows",
    "csa gather",
    "hca gather",
    "router",
];

/// The kinds of a step with attention in place, which follow the others.
const ATTENDS: [&str; 3] = ["swa attend", "csa attend", "hca attend"];
/// The kinds that such a step lacks.
const GATHERS: [&str; 3] = ["windows", "csa gather", "hca gather"];

/// The rows as a table.
pub fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
    let head = ["model", "context", "requests", "phase", "nodes", "step us", "with router"];
    let head = head.into_iter().chain(["updates + append"]).chain(KINDS);
    let attends = rows.iter().any(|row| row.case.attention);
    let in_place =
        ["step us, in place"].into_iter().chain(ATTENDS).chain(["sum of kinds, in place"]);
    let in_place = in_place.filter(|_| attends);
    table.set_header(
        head.chain([
            "sum of kinds",
            "begin us",
            "own begin us",
            "host us",
            "own host us",
            "ns a launch",
            "own ns a launch",
        ])
        .chain(in_place),
    );
    for Row { case, measured } in rows {
        let weight = if case.weight == Weight::Nvfp4 { " (NVFP4)" } else { "" };
        let cluster =
            if case.attention_cluster == ClusterChoice::OneBlock { ", one block" } else { "" };
        let mut cells = vec![
            format!("{}{weight}{cluster}", case.model),
            case.context.to_string(),
            case.requests.to_string(),
        ];
        match measured {
            Ok(measured) => cells.extend(measured.cells()),
            Err(why) => cells.push(why.clone()),
        }
        table.add_row(cells);
    }
    table
}

impl Measured {
    fn cells(&self) -> Vec<String> {
        let Self { phase, step, routed, updates, attended, kinds, host } = self;
        let microseconds = |of: f64| format!("{of:.1}");
        let kind = |name| kinds.iter().find(|kind| kind.name == name);
        let of_kind = |name| kind(name).map_or(0.0, |kind| kind.timed.microseconds);
        let of_step = KINDS.into_iter().filter(|&name| name != "router");
        let sum: f64 = of_step.clone().map(of_kind).sum();
        let mut cells = vec![phase.name().to_owned(), step.nodes.to_string()];
        let graphs = [step, routed, updates].map(|timed| timed.microseconds);
        cells.extend(graphs.into_iter().chain(KINDS.map(of_kind)).map(microseconds));
        let Hosts { device, own } = host;
        let begin = [device.begin_microseconds, own.begin_microseconds];
        let launches = [device.microseconds, own.microseconds];
        cells.push(microseconds(sum));
        cells.extend(begin.into_iter().chain(launches).map(microseconds));
        cells.extend(launches.map(|of| format!("{:.0}", 1e3 * of / step.nodes as f64)));
        if let Some(attended) = attended {
            let kept = of_step.filter(|name| !GATHERS.contains(name)).map(of_kind);
            let in_place = ATTENDS.map(of_kind);
            let sum = kept.chain(in_place).sum();
            let all = [attended.microseconds].into_iter().chain(in_place).chain([sum]);
            cells.extend(all.map(microseconds));
        }
        cells
    }
}
