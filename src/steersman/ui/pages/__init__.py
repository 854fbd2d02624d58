"""The pages: a module and a template each."""
