//! Files and their imports as a graph, and its cycles.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

use super::paths::NamedPath;

/// The imports between files.
#[derive(Debug, Default)]
pub struct Graph {
    /// The imports of each file: the imported file, and one path that imports it.
    imports: BTreeMap<PathBuf, BTreeMap<PathBuf, NamedPath>>,
}

/// A set of files, each of which reaches all others by imports.
#[derive(Debug)]
pub struct Cycle {
    /// The files, sorted.
    pub files: Vec<PathBuf>,
    /// A shortest path of imports from one of the files back to itself.
    pub way_around: Vec<ImportOf>,
}

/// One import of one file from another.
#[derive(Debug)]
pub struct ImportOf {
    /// The file that imports.
    pub from: PathBuf,
    /// The file imported from.
    pub to: PathBuf,
    /// The path in the code.
    pub path: String,
    /// The line in `from`.
    pub line: usize,
}

impl Graph {
    /// Adds a file, without imports.
    pub fn add_file(&mut self, file: &Path) {
        self.imports.entry(file.to_owned()).or_default();
    }

    /// Adds that `from` imports `to`. A file that names its own items does not import.
    pub fn add_import(&mut self, from: &Path, to: &Path, path: &NamedPath) {
        if from != to {
            let imports = self.imports.entry(from.to_owned()).or_default();
            imports.entry(to.to_owned()).or_insert_with(|| path.clone());
        }
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.imports.len()
    }

    /// All cycles. No file is in two of them.
    pub fn cycles(&self) -> Vec<Cycle> {
        let reached: BTreeMap<&PathBuf, BTreeSet<&PathBuf>> =
            self.imports.keys().map(|file| (file, self.reached(file))).collect();
        let mut cycles = Vec::new();
        let mut seen: BTreeSet<&PathBuf> = BTreeSet::new();
        for (file, others) in &reached {
            if seen.contains(file) || !others.contains(file) {
                continue;
            }
            let files: Vec<&PathBuf> =
                others.iter().copied().filter(|other| reached[other].contains(file)).collect();
            seen.extend(files.iter().copied());
            cycles.push(Cycle {
                way_around: self.way_around(file),
                files: files.into_iter().cloned().collect(),
            });
        }
        cycles
    }

    /// The files that `file` imports, directly or through others. `file` itself is included only if it is in a cycle.
    fn reached(&self, file: &PathBuf) -> BTreeSet<&PathBuf> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&PathBuf> = self.imports[file].keys().collect();
        while let Some(next) = open.pop() {
            if reached.insert(next) {
                open.extend(self.imports.get(next).into_iter().flat_map(BTreeMap::keys));
            }
        }
        reached
    }

    /// A shortest path of imports from `start`, which is in a cycle, back to itself.
    fn way_around(&self, start: &PathBuf) -> Vec<ImportOf> {
        let mut came_from: BTreeMap<&PathBuf, &PathBuf> = BTreeMap::new();
        let mut queue = VecDeque::from([start]);
        while let Some(file) = queue.pop_front().filter(|_| !came_from.contains_key(start)) {
            for to in self.imports.get(file).into_iter().flat_map(BTreeMap::keys) {
                came_from.entry(to).or_insert_with(|| {
                    queue.push_back(to);
                    file
                });
            }
        }
        let mut way = Vec::new();
        let mut at = start;
        while let Some(from) = came_from.get(at).copied() {
            let path = &self.imports[from][at];
            way.push(ImportOf {
                from: from.clone(),
                to: at.clone(),
                path: path.to_string(),
                line: path.line,
            });
            at = from;
            if at == start {
                break;
            }
        }
        way.reverse();
        way
    }
}
