//! Collects the paths that code names: in imports, types, expressions, patterns, and in arguments of macros.

use std::fmt;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

/// A path, and its line.
#[derive(Clone, Debug)]
pub struct NamedPath {
    /// Its segments, the first of which may be `crate`, `self` or `super`.
    pub segments: Vec<String>,
    /// Its line in the file.
    pub line: usize,
    /// Whether it names a macro that is called, such as `view` in `view!(..)`.
    pub of_macro: bool,
}

impl fmt::Display for NamedPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.segments.join("::"))
    }
}

/// A leaf of a `use` declaration.
#[derive(Clone, Debug)]
pub struct Import {
    /// The name that it imports; `None` for `*`.
    pub name: Option<String>,
    /// The path from which it imports.
    pub path: Vec<String>,
}

/// Whether an item with these attributes belongs to tests.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_cfg_test =
            || attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"));
        attribute.path().is_ident("test") || (attribute.path().is_ident("cfg") && is_cfg_test())
    })
}

/// The paths of a module's items.
#[derive(Default)]
pub struct PathCollector {
    /// Leaves of all `use` declarations, also of those inside functions.
    pub imports: Vec<Import>,
    /// Paths that code and private imports name.
    pub paths: Vec<NamedPath>,
}

impl PathCollector {
    /// Adds the paths of `item`.
    pub fn add(&mut self, item: &Item) {
        self.visit_item(item);
    }

    fn add_path(&mut self, path: &syn::Path, of_macro: bool) {
        let segments: Vec<String> =
            path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        let Some(first) = path.segments.first() else { return };
        let line = first.ident.span().start().line;
        // `::name` is a path of another crate.
        if path.leading_colon.is_none() {
            self.paths.push(NamedPath { segments, line, of_macro });
        }
    }

    /// Adds paths such as `a::b` and names such as `a` from the arguments of a macro.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Option<NamedPath> = None;
        let mut colons = 0;
        for token in tokens {
            match &token {
                TokenTree::Ident(name) => match path.as_mut().filter(|_| colons == 2) {
                    Some(path) => path.segments.push(name.to_string()),
                    None => {
                        let line = name.span().start().line;
                        let segments = vec![name.to_string()];
                        self.paths.extend(path.replace(NamedPath {
                            segments,
                            line,
                            of_macro: false,
                        }));
                    }
                },
                TokenTree::Punct(punct) if punct.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Group(group) => {
                    self.paths.extend(path.take());
                    self.add_tokens(group.stream());
                }
                _ => self.paths.extend(path.take()),
            }
            colons = 0;
        }
        self.paths.extend(path);
    }

    fn add_use(&mut self, tree: &UseTree, before: &[String], re_exported: bool) {
        let mut path = before.to_vec();
        match tree {
            UseTree::Path(tree) => {
                path.push(tree.ident.to_string());
                self.add_use(&tree.tree, &path, re_exported);
            }
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_use(tree, &path, re_exported));
            }
            UseTree::Glob(_) => self.imports.push(Import { name: None, path }),
            UseTree::Name(leaf) => self.add_leaf(path, &leaf.ident, &leaf.ident, re_exported),
            UseTree::Rename(leaf) => self.add_leaf(path, &leaf.ident, &leaf.rename, re_exported),
        }
    }

    fn add_leaf(
        &mut self,
        mut path: Vec<String>,
        leaf: &proc_macro2::Ident,
        name: &proc_macro2::Ident,
        re_exported: bool,
    ) {
        // `use a::{self}` imports `a`.
        if leaf != "self" || path.is_empty() {
            path.push(leaf.to_string());
        }
        let name = if name == "self" { path.last().cloned() } else { Some(name.to_string()) };
        if !re_exported {
            let line = leaf.span().start().line;
            self.paths.push(NamedPath { segments: path.clone(), line, of_macro: false });
        }
        self.imports.push(Import { name, path });
    }
}

impl<'ast> Visit<'ast> for PathCollector {
    fn visit_item(&mut self, item: &'ast Item) {
        let makro = match item {
            Item::Macro(item) => item.ident.is_some(),
            _ => false,
        };
        if !makro {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() {
            let re_exported = !matches!(item.vis, Visibility::Inherited);
            self.add_use(&item.tree, &[], re_exported);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.add_path(path, false);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, makro: &'ast syn::Macro) {
        self.add_path(&makro.path, true);
        self.add_tokens(makro.tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}
