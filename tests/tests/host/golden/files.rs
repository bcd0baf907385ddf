//! The golden files: all are there and readable, and errors name the file.

use dsv4_kv_tests::golden;

#[test]
fn all_vectors_are_there() {
    let arrays = std::fs::read_dir(golden::folder())
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().extension() == Some("npy".as_ref()))
        .count();
    assert_eq!(arrays, 78);
}

#[test]
fn the_five_element_types_are_read() -> anyhow::Result<()> {
    assert_eq!(golden::load::<f32>("e2m1_decode")?.data[7], 6.0);
    assert_eq!(golden::load::<u16>("row_in_bf16")?.rows().len(), 16);
    assert_eq!(golden::load::<u8>("nvfp4_scale")?.shape, [16, 8]);
    assert_eq!(golden::load::<i32>("csa_state_positions")?.data, [20, 21, 22, 23, 24, 25, 26]);
    assert_eq!(golden::load::<i64>("rope_positions")?.shape, [10]);
    Ok(())
}

#[test]
fn a_vector_of_another_type_is_named() {
    let error = golden::load::<u8>("e2m1_decode").unwrap_err();
    assert!(format!("{error:#}").contains("e2m1_decode.npy"), "{error:#}");
}

#[test]
fn an_absent_vector_is_named() {
    let error = golden::load::<f32>("no_such_vector").unwrap_err();
    assert!(format!("{error:#}").contains("no_such_vector.npy"), "{error:#}");
    let error = golden::text("no_such.json").unwrap_err();
    assert!(format!("{error:#}").contains("no_such.json"), "{error:#}");
}
