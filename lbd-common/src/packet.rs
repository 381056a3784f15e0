//! Header offsets and parsing.
