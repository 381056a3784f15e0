//! Consistent-hash tables.
