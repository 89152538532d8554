import CoreML
import Foundation
import Tokenizers

/// A model that drafts for itself, as `python -m ssmlx.export --target coreml` wrote it.
public final class StreamingModel {
    public let tokenizer: any Tokenizer
    private let manifest: Manifest
    private let prefill: MLModel
    private let decode: MLModel

    /// Loads an export's folder.
    ///
    /// - Parameters:
    ///   - folder: with `manifest.json`, the tokenizer and the package, compiled (`.mlmodelc`, as
    ///     Xcode puts it into an app) or not (`.mlpackage`).
    ///   - computeUnits: `.cpuAndGPU` for the profile `gpu`, `.cpuAndNeuralEngine` for `ane`.
    public init(folder: URL, computeUnits: MLComputeUnits = .cpuAndGPU) async throws {
        manifest = try Manifest.read(from: folder)
        let compiled = try await Self.compiledModel(in: folder)
        prefill = try await Self.load("prefill", of: compiled, on: computeUnits)
        decode = try await Self.load("decode", of: compiled, on: computeUnits)
        tokenizer = try await AutoTokenizer.from(modelFolder: folder)
    }

    /// Answers `prompt` greedily; `onTokens` is given the tokens of each call of the model.
    ///
    /// - Returns: the tokens, and the calls that they took.
    public func generate(
        prompt: [Int], maxTokens: Int, onTokens: ([Int]) -> Void
    ) throws -> (tokens: [Int], calls: Int) {
        guard let root = prompt.last else { throw ExportError.contextIsFull }
        // One state for both functions: they share the cache.
        var cache = SlotCache(state: decode.makeState(), numSlots: manifest.numSlots)
        try fill(&cache, with: prompt.dropLast().map(Int32.init))
        var (tree, answer, calls) = (DraftTree(root: Int32(root)), [Int](), 0)
        let ends = Set(manifest.endTokenIds)
        while cache.offset + manifest.numNodes <= manifest.numSlots {
            var tokens: [Int]
            (tokens, tree) = try step(tree, &cache)
            calls += 1
            let end = tokens.firstIndex(where: ends.contains)
            tokens = Array(tokens.prefix(min((end ?? tokens.count) + 1, maxTokens - answer.count)))
            answer += tokens
            onTokens(tokens)
            if end != nil || answer.count >= maxTokens { break }
        }
        return (answer, calls)
    }

    /// The tokens of what a user asks, under the adapter's own template, or as a chat.
    public func promptTokens(_ text: String) throws -> [Int] {
        guard let template = manifest.promptTemplate else {
            return try tokenizer.applyChatTemplate(messages: [["role": "user", "content": text]])
        }
        let whole = template.replacingOccurrences(of: "{prompt}", with: text)
        return tokenizer.encode(text: whole, addSpecialTokens: false)
    }

    // MARK: - The two functions

    /// Puts tokens into the cache, a chunk at a time; rows that fill up use slots that stay free.
    private func fill(_ cache: inout SlotCache, with tokens: [Int32]) throws {
        let size = manifest.chunk
        for first in stride(from: 0, to: tokens.count, by: size) {
            let chunk = Array(tokens[first..<min(first + size, tokens.count)])
            let slots = try cache.free(size)
            let padded = chunk + Array(repeating: 0, count: size - chunk.count)
            let inputs: [String: MLFeatureValue] = [
                "tokens": integers(padded),
                "positions": integers((0..<size).map { position(cache.offset + $0) }),
                "slots": integers(slots.map(Int32.init)),
                "mask": MLFeatureValue(shapedArray: cache.mask(rows: slots) { Array(0...$0) }),
            ]
            _ = try run(prefill, inputs, cache)
            cache.commit(Array(slots.prefix(chunk.count)))
        }
    }

    /// One call of the model: the tokens that it advances by, and the next tree.
    private func step(_ tree: DraftTree, _ cache: inout SlotCache) throws -> ([Int], DraftTree) {
        let slots = try cache.free(manifest.numNodes)
        let found = try run(decode, stepInputs(tree, slots, cache), cache)
        // Nodes that pruning kept; rows that only fill the tree up stand behind its nodes.
        let kept = found.featureValue(for: "kept") == nil
            ? Array(tree.tokens.indices)
            : try scalars("kept", Int32.self, of: found).map(Int.init).filter { $0 < tree.tokens.count }
        let verified = tree.selecting(kept)
        let targets = try scalars("target_tokens", Int32.self, of: found)
        let path = verified.acceptedPath(targets)
        guard try scalars("last", Int32.self, of: found).first == Int32(path.last!) else {
            throw ExportError.mismatch("the model drafted for another node than was accepted")
        }
        cache.commit(path.map { slots[kept[$0]] })
        let tokens = path.map { targets[$0] }
        let next = DraftTree(
            root: tokens.last!,
            candidates: try scalars("candidate_tokens", Int32.self, of: found),
            logprobs: try scalars("candidate_logprobs", Float16.self, of: found).map(Float.init),
            shape: manifest.tree)
        return (tokens.map(Int.init), next)
    }

    /// What "decode" takes; rows that the tree lacks see themselves alone and have depth -1.
    private func stepInputs(
        _ tree: DraftTree, _ slots: [Int], _ cache: SlotCache
    ) -> [String: MLFeatureValue] {
        let (size, count) = (manifest.numNodes, tree.tokens.count)
        let line: (Int) -> [Int] = { $0 < count ? tree.paths[$0] : [$0] }
        var ancestors = [Float16](repeating: 0, count: size * size)
        for row in 0..<size { for node in line(row) { ancestors[row * size + node] = 1 } }
        let depths = (0..<size).map { $0 < count ? tree.depth(of: $0) : -1 }
        let parents = (0..<size).map { $0 < count ? tree.parent(of: $0) : $0 }
        return [
            "tokens": integers(tree.tokens + Array(repeating: 0, count: size - count)),
            "positions": integers(depths.map { position(cache.offset + max($0, 0)) }),
            "slots": integers(slots.map(Int32.init)),
            "mask": MLFeatureValue(shapedArray: cache.mask(rows: slots, visible: line)),
            "parents": integers(parents.map(Int32.init)),
            "depths": integers(depths.map(Int32.init)),
            "ancestors": MLFeatureValue(
                shapedArray: MLShapedArray(scalars: ancestors, shape: [size, size])),
        ]
    }

    /// Rows that only fill up may stand behind the last position; they take that.
    private func position(_ place: Int) -> Int32 {
        Int32(min(place, manifest.numSlots - 1))
    }

    private func run(
        _ model: MLModel, _ inputs: [String: MLFeatureValue], _ cache: SlotCache
    ) throws -> any MLFeatureProvider {
        let provider = try MLDictionaryFeatureProvider(dictionary: inputs)
        return try model.prediction(from: provider, using: cache.state)
    }

    // MARK: - Small things

    private func integers(_ values: [Int32]) -> MLFeatureValue {
        MLFeatureValue(shapedArray: MLShapedArray(scalars: values, shape: [values.count]))
    }

    private func scalars<Scalar: MLShapedArrayScalar>(
        _ name: String, _: Scalar.Type, of found: any MLFeatureProvider
    ) throws -> [Scalar] {
        guard let array = found.featureValue(for: name)?.shapedArrayValue(of: Scalar.self) else {
            throw ExportError.missingOutput(name)
        }
        return array.scalars
    }

    private static func compiledModel(in folder: URL) async throws -> URL {
        let compiled = folder.appending(path: "model.mlmodelc")
        if FileManager.default.fileExists(atPath: compiled.path()) { return compiled }
        return try await MLModel.compileModel(at: folder.appending(path: "model.mlpackage"))
    }

    private static func load(
        _ function: String, of model: URL, on computeUnits: MLComputeUnits
    ) async throws -> MLModel {
        let configuration = MLModelConfiguration()
        configuration.functionName = function
        configuration.computeUnits = computeUnits
        return try await MLModel.load(contentsOf: model, configuration: configuration)
    }
}
