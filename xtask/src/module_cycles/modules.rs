//! The module tree of one library or program, as its files declare it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use syn::{Attribute, Item};

use super::paths::{Import, NamedPath, PathCollector, is_test};

/// Index of a module in its [`Tree`].
pub type ModuleId = usize;

/// A module: a file, or a `mod name { .. }` in one.
#[derive(Debug, Default)]
pub struct Module {
    file: PathBuf,
    parent: Option<ModuleId>,
    children: BTreeMap<String, ModuleId>,
    items: BTreeSet<String>,
    imports: Vec<Import>,
    paths: Vec<NamedPath>,
    has_generated_items: bool,
}

impl Module {
    /// The file it is in.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The parent module; `None` for the root.
    pub fn parent(&self) -> Option<ModuleId> {
        self.parent
    }

    /// Its module called `name`.
    pub fn child(&self, name: &str) -> Option<ModuleId> {
        self.children.get(name).copied()
    }

    /// Whether it defines `name` itself.
    pub fn defines(&self, name: &str) -> bool {
        self.items.contains(name)
    }

    /// Its imports and re-exports.
    pub fn imports(&self) -> &[Import] {
        &self.imports
    }

    /// The paths that its code and its private imports name.
    pub fn paths(&self) -> &[NamedPath] {
        &self.paths
    }

    /// Whether a macro call generates items in it, whose names this check cannot see.
    pub fn has_generated_items(&self) -> bool {
        self.has_generated_items
    }
}

/// All modules of a library or program.
#[derive(Debug, Default)]
pub struct Tree {
    modules: Vec<Module>,
    /// Files that define `macro_rules!`, by the macro's name. Such a macro is used by its name alone, without a path.
    macros: BTreeMap<String, PathBuf>,
}

impl Tree {
    /// Reads the tree whose root is the file `root`.
    ///
    /// # Errors
    /// A file is missing or is not Rust, or a module is declared with `#[path]`, which this check does not follow.
    pub fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        let folder = root.parent().context("a source file lies in a folder")?;
        tree.add_file(root, folder, None)?;
        Ok(tree)
    }

    /// All modules, the root first.
    pub fn modules(&self) -> impl Iterator<Item = &Module> {
        self.modules.iter()
    }

    /// The module `id`.
    pub fn module(&self, id: ModuleId) -> &Module {
        &self.modules[id]
    }

    /// The id of a module of this tree.
    pub fn id(&self, module: &Module) -> ModuleId {
        let found = self.modules.iter().position(|other| std::ptr::eq(other, module));
        found.expect("a module of this tree")
    }

    /// The file that defines the macro `name`.
    pub fn macro_file(&self, name: &str) -> Option<&Path> {
        self.macros.get(name).map(PathBuf::as_path)
    }

    /// Adds the module in `file`, whose children lie in `folder`.
    fn add_file(
        &mut self,
        file: &Path,
        folder: &Path,
        parent: Option<ModuleId>,
    ) -> Result<ModuleId> {
        let text =
            fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        let parsed =
            syn::parse_file(&text).with_context(|| format!("cannot parse {}", file.display()))?;
        let id = self.add_module(file, parent);
        self.add_items(id, &parsed.items, folder)?;
        Ok(id)
    }

    fn add_module(&mut self, file: &Path, parent: Option<ModuleId>) -> ModuleId {
        self.modules.push(Module { file: file.to_owned(), parent, ..Module::default() });
        self.modules.len() - 1
    }

    fn add_items(&mut self, id: ModuleId, items: &[Item], folder: &Path) -> Result<()> {
        let mut collector = PathCollector::default();
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            match item {
                Item::Mod(module) => {
                    self.add_child(id, module, folder)?;
                    continue;
                }
                Item::Macro(makro) => match &makro.ident {
                    Some(name) => {
                        let file = self.modules[id].file.clone();
                        self.macros.insert(name.to_string(), file);
                    }
                    None => self.modules[id].has_generated_items = true,
                },
                _ => {}
            }
            self.modules[id].items.extend(name(item));
            collector.add(item);
        }
        let module = &mut self.modules[id];
        module.imports = collector.imports;
        module.paths = collector.paths;
        Ok(())
    }

    fn add_child(&mut self, parent: ModuleId, module: &syn::ItemMod, folder: &Path) -> Result<()> {
        let name = module.ident.to_string();
        if module.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
            bail!("mod {name} in {}: #[path] is not followed", self.modules[parent].file.display());
        }
        let inner = folder.join(&name);
        let child = match &module.content {
            Some((_, items)) => {
                let file = self.modules[parent].file.clone();
                let child = self.add_module(&file, Some(parent));
                self.add_items(child, items, &inner)?;
                child
            }
            None => {
                let file = [folder.join(format!("{name}.rs")), inner.join("mod.rs")];
                let declared = self.modules[parent].file.display();
                let file = file.iter().find(|file| file.is_file()).with_context(|| {
                    format!("{declared} declares mod {name}, which has no file")
                })?;
                self.add_file(file, &inner, Some(parent))?
            }
        };
        self.modules[parent].children.insert(name, child);
        Ok(())
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that `item` defines.
fn name(item: &Item) -> Option<String> {
    let name = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}
