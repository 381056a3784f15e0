//! Merge patch (RFC 7396) and JSON patch (RFC 6902).

use serde_json::{Value, json};

/// Merges `patch` into `target`.
pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let Some(map) = target.as_object_mut() else { return };
    for (name, value) in patch {
        if value.is_null() {
            map.remove(name);
        } else {
            merge(map.entry(name.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Runs a JSON patch on `target`.
pub(super) fn json(target: &mut Value, patch: &Value) -> Result<(), String> {
    for operation in patch.as_array().ok_or("a JSON patch is a list")? {
        let text = |name: &str| operation[name].as_str().ok_or_else(|| format!("`{name}` is missing"));
        let (kind, path) = (text("op")?, text("path")?);
        let value = || operation.get("value").cloned().ok_or_else(|| "`value` is missing".to_owned());
        match kind {
            "add" => add(target, path, value()?)?,
            "replace" => {
                *target.pointer_mut(path).ok_or_else(|| format!("nothing at {path}"))? = value()?;
            }
            "remove" => {
                take(target, path)?;
            }
            "test" => {
                if target.pointer(path) != Some(&value()?) {
                    return Err(format!("test failed at {path}"));
                }
            }
            "move" => {
                let moved = take(target, text("from")?)?;
                add(target, path, moved)?;
            }
            "copy" => {
                let from = text("from")?;
                let copied = target.pointer(from).cloned().ok_or_else(|| format!("nothing at {from}"))?;
                add(target, path, copied)?;
            }
            other => return Err(format!("unknown operation `{other}`")),
        }
    }
    Ok(())
}

fn parent<'value>(target: &'value mut Value, path: &str) -> Result<(&'value mut Value, String), String> {
    let (parent, last) = path.rsplit_once('/').ok_or_else(|| format!("bad path {path}"))?;
    let value = target.pointer_mut(parent).ok_or_else(|| format!("nothing at {parent}"))?;
    Ok((value, last.replace("~1", "/").replace("~0", "~")))
}

fn add(target: &mut Value, path: &str, value: Value) -> Result<(), String> {
    if path.is_empty() {
        *target = value;
        return Ok(());
    }
    let (parent, last) = parent(target, path)?;
    match parent {
        Value::Object(map) => {
            map.insert(last, value);
        }
        Value::Array(items) if last == "-" => items.push(value),
        Value::Array(items) => {
            let index = last.parse::<usize>().ok().filter(|index| *index <= items.len());
            items.insert(index.ok_or_else(|| format!("bad index in {path}"))?, value);
        }
        _ => return Err(format!("nothing can be added at {path}")),
    }
    Ok(())
}

fn take(target: &mut Value, path: &str) -> Result<Value, String> {
    let (parent, last) = parent(target, path)?;
    let taken = match parent {
        Value::Object(map) => map.remove(&last),
        Value::Array(items) => {
            last.parse::<usize>().ok().filter(|index| *index < items.len()).map(|index| items.remove(index))
        }
        _ => None,
    };
    taken.ok_or_else(|| format!("nothing at {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_patch() {
        let mut target = json!({"a": {"b": 1, "c": 2}, "d": [1, 2]});
        merge(&mut target, &json!({"a": {"b": null, "e": {"f": null, "g": 1}}, "d": [3]}));
        assert_eq!(target, json!({"a": {"c": 2, "e": {"g": 1}}, "d": [3]}));
    }

    #[test]
    fn json_patch() {
        let mut target = json!({"a": [1, 2], "b/c": {}});
        let patch = json!([
            {"op": "test", "path": "/a/0", "value": 1}, {"op": "add", "path": "/a/1", "value": 9},
            {"op": "remove", "path": "/a/0"}, {"op": "replace", "path": "/a/1", "value": 3},
            {"op": "add", "path": "/b~1c/d", "value": 4}, {"op": "add", "path": "/a/-", "value": 5}]);
        json(&mut target, &patch).unwrap();
        assert_eq!(target, json!({"a": [9, 3, 5], "b/c": {"d": 4}}));
        assert!(json(&mut target, &json!([{"op": "remove", "path": "/x"}])).is_err());
    }
}
