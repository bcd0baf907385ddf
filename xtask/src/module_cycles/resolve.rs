//! Finds the files that a path leads to, through imports and re-exports.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::modules::{Module, ModuleId, Tree};
use super::paths::NamedPath;

/// What a name stands for. One name may have several meanings: a module and a function, or another item under each
/// `cfg`.
#[derive(Clone, Copy, Debug)]
enum Meaning<'a> {
    Module(ModuleId),
    /// An item, given by the file that defines it.
    Item(&'a Path),
}

/// The files that define the item to which `path` leads, as seen from `module`. Empty for paths of other crates,
/// modules and local variables.
pub fn files(tree: &Tree, module: &Module, path: &NamedPath) -> BTreeSet<PathBuf> {
    let mut search = Search { tree, open: Vec::new() };
    let mut files: BTreeSet<PathBuf> = search
        .path(tree.id(module), &path.segments)
        .into_iter()
        .filter_map(|meaning| match meaning {
            Meaning::Item(file) => Some(file.to_owned()),
            Meaning::Module(_) => None,
        })
        .collect();
    if files.is_empty()
        && path.of_macro
        && let [name] = path.segments.as_slice()
    {
        files.extend(tree.macro_file(name).map(Path::to_owned));
    }
    files
}

struct Search<'a> {
    tree: &'a Tree,
    /// The names that are being looked up. They stop the recursion if imports form a cycle.
    open: Vec<(ModuleId, String)>,
}

impl<'a> Search<'a> {
    fn path(&mut self, from: ModuleId, segments: &[String]) -> Vec<Meaning<'a>> {
        let Some((first, rest)) = segments.split_first() else { return Vec::new() };
        let start = match first.as_str() {
            "crate" => vec![Meaning::Module(0)],
            "self" => vec![Meaning::Module(from)],
            "super" => self.tree.module(from).parent().map(Meaning::Module).into_iter().collect(),
            name => self.name(from, name),
        };
        rest.iter().fold(start, |meanings, segment| {
            // A function or macro may have the same name as a module; then the path continues in the module.
            let in_module = meanings.iter().any(|meaning| matches!(meaning, Meaning::Module(_)));
            let follows =
                |meaning: &Meaning<'_>| !in_module || matches!(meaning, Meaning::Module(_));
            let followed = meanings.into_iter().filter(follows);
            followed.flat_map(|meaning| self.step(meaning, segment)).collect()
        })
    }

    /// The meanings of `segment` after `meaning`. Segments after an item (variants, functions) are part of the item.
    fn step(&mut self, meaning: Meaning<'a>, segment: &str) -> Vec<Meaning<'a>> {
        match meaning {
            Meaning::Item(_) => vec![meaning],
            Meaning::Module(id) if segment == "super" => {
                self.tree.module(id).parent().map(Meaning::Module).into_iter().collect()
            }
            Meaning::Module(id) => {
                let found = self.name(id, segment);
                let module = self.tree.module(id);
                match found.is_empty() && module.has_generated_items() {
                    true => vec![Meaning::Item(module.file())],
                    false => found,
                }
            }
        }
    }

    /// The meanings of `name` in the module `id`.
    fn name(&mut self, id: ModuleId, name: &str) -> Vec<Meaning<'a>> {
        let key = (id, name.to_owned());
        if self.open.contains(&key) {
            return Vec::new();
        }
        self.open.push(key);
        let module = self.tree.module(id);
        let mut found: Vec<_> = module.child(name).map(Meaning::Module).into_iter().collect();
        if module.defines(name) {
            found.push(Meaning::Item(module.file()));
        }
        for import in module.imports() {
            match &import.name {
                Some(imported) if imported == name => found.extend(self.path(id, &import.path)),
                None if found.is_empty() => {
                    let modules = self.path(id, &import.path);
                    found.extend(modules.into_iter().flat_map(|meaning| match meaning {
                        Meaning::Module(module) => self.name(module, name),
                        Meaning::Item(_) => Vec::new(),
                    }));
                }
                _ => {}
            }
        }
        self.open.pop();
        found
    }
}
